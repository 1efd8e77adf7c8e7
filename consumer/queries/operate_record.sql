-- What a record that was set aside holds: its payload, and its headers as they are stored (inbox/parked.rs). $1 its sequence.
SELECT payload, headers::text FROM inbox.parked WHERE sequence = $1
