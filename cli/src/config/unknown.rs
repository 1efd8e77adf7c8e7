//! Finds what is given but not known, and what it was probably meant to be.

use figment::value::{Dict, Tag, Value};

/// A key that is given and means nothing.
#[derive(Debug, PartialEq)]
pub(super) struct Stray {
    pub(super) key: String,
    pub(super) tag: Tag,
    pub(super) wrong: Wrong,
}

/// What is wrong with it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Wrong {
    /// There is no such key or section.
    Unknown { nearest: Option<String> },
    /// A section's name with a value: `lease = 5`.
    SectionExpected,
    /// A key's name with a table under it: `[lease.ttl]`.
    ValueExpected,
}

/// The first key of `given` that `known` does not have.
pub(super) fn first_stray(given: &Dict, known: &Dict) -> Option<Stray> {
    let mut names = Vec::new();
    list(&mut names, "", known);
    stray_in("", given, known, &names)
}

fn stray_in(path: &str, given: &Dict, known: &Dict, names: &[String]) -> Option<Stray> {
    given.iter().find_map(|(name, value)| {
        let key = join(path, name);
        let stray = |wrong| Some(Stray { key: key.clone(), tag: value.tag(), wrong });
        match (value, known.get(name)) {
            // librdkafka knows its own settings; they are checked where the client is made.
            (Value::Dict(..), Some(Value::Dict(..))) if key == "kafka.properties" => None,
            (Value::Dict(_, given), Some(Value::Dict(_, known))) => stray_in(&key, given, known, names),
            (_, Some(Value::Dict(..))) => stray(Wrong::SectionExpected),
            (Value::Dict(..), Some(_)) => stray(Wrong::ValueExpected),
            (_, Some(_)) => None,
            (_, None) => stray(Wrong::Unknown { nearest: nearest(&key, names) }),
        }
    })
}

fn list(names: &mut Vec<String>, path: &str, known: &Dict) {
    for (name, value) in known {
        let key = join(path, name);
        names.push(key.clone());
        if let Value::Dict(_, inner) = value {
            list(names, &key, inner);
        }
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// The known name most like `key`, if any is like it: by spelling, or the same word in another section.
fn nearest(key: &str, names: &[String]) -> Option<String> {
    let last = |name: &str| name.rsplit('.').next().unwrap_or_default().to_owned();
    let spelt = key.replace('_', ".");
    let likeness = |name: &String| {
        let as_a_whole = strsim::normalized_damerau_levenshtein(&spelt, &name.replace('_', "."));
        let same_word = key.contains('.') && name.contains('.') && last(name) == last(key);
        if same_word { as_a_whole.max(0.75) } else { as_a_whole }
    };
    names
        .iter()
        .map(|name| (likeness(name), name))
        .filter(|(likeness, _)| *likeness >= 0.65)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| name.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Vec<String> {
        ["lease", "lease.ttl", "lease.margin", "poll.ceiling", "publish.in_flight_rows", "kafka.brokers"]
            .map(str::to_owned)
            .to_vec()
    }

    #[test]
    fn a_misspelt_key_is_told_its_neighbour() {
        for (key, nearest_to_it) in [
            ("lease.tll", "lease.ttl"),
            ("leases.ttl", "lease.ttl"),
            ("relay.ttl", "lease.ttl"),
            ("lease_ttl", "lease.ttl"),
            ("poll.cieling", "poll.ceiling"),
            ("publish.in.flight.rows", "publish.in_flight_rows"),
            ("kafka.broker", "kafka.brokers"),
            ("leases", "lease"),
        ] {
            assert_eq!(nearest(key, &names()).as_deref(), Some(nearest_to_it), "{key}");
        }
    }

    #[test]
    fn a_key_like_no_other_gets_no_suggestion() {
        assert_eq!(nearest("colour", &names()), None);
    }
}
