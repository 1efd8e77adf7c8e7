-- Whether the holder's own completion stands there: its reply may have been lost. $4 owner, $5 generation, $6 fingerprint.
SELECT EXISTS (SELECT FROM inbox.message
               WHERE consumer = $1 AND scope = $2 AND key = $3 AND state = 'done'
                 AND owner = $4 AND generation = $5 AND fingerprint = $6)
