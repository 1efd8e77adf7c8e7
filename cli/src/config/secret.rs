//! What must never be printed, and how it is shown instead.
//!
//! A password may stand in a Postgres URL (before the `@` or as a parameter) or in a librdkafka setting. Masking never
//! parses what it masks: a malformed URL hides its password as well as a good one does.

use std::borrow::Cow;

/// Shown in place of a secret.
pub(crate) const MASK: &str = "***";

/// Parts of the names of librdkafka settings (and URL parameters) that hold secrets; misspelt ones count too.
const SECRET_WORDS: [&str; 9] =
    ["pass", "pwd", "secret", "credential", "token", "private.key", "key.pem", "oauthbearer.config", "jaas"];

/// Whether the librdkafka setting `name` may hold a secret.
pub(crate) fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    // Not secrets: where a token is asked for, and by which path a key is found.
    let is_a_place = name.ends_with(".location") || name.ends_with(".url");
    !is_a_place && SECRET_WORDS.iter().any(|word| name.contains(word))
}

/// `text` with the password of every URL in it replaced by [`MASK`].
pub(crate) fn mask_urls(text: &str) -> Cow<'_, str> {
    let masked = mask_user_info(text);
    match mask_parameters(&masked) {
        Some(masked) => Cow::Owned(masked),
        None => masked,
    }
}

/// `scheme://user:password@…`. The password ends at the last `@` of its word: an unescaped `@`, `/` or `?` inside it
/// makes the URL malformed, and must not make it visible.
fn mask_user_info(text: &str) -> Cow<'_, str> {
    let mut masked = String::new();
    let mut rest = text;
    while let Some(start) = rest.find("://") {
        let (before, after) = rest.split_at(start + "://".len());
        let word =
            after.find(|c: char| c.is_whitespace() || matches!(c, '"' | '\'' | '`')).unwrap_or(after.len());
        let (word, next) = after.split_at(word);
        masked.push_str(before);
        match word
            .rsplit_once('@')
            .and_then(|(user_info, host)| user_info.split_once(':').map(|(user, _)| (user, host)))
        {
            Some((user, host)) => {
                masked.push_str(user);
                masked.push(':');
                masked.push_str(MASK);
                masked.push('@');
                masked.push_str(host);
            }
            None => masked.push_str(word),
        }
        rest = next;
    }
    if masked.is_empty() {
        return Cow::Borrowed(text);
    }
    masked.push_str(rest);
    Cow::Owned(masked)
}

/// `?password=…` and the like.
fn mask_parameters(text: &str) -> Option<String> {
    let (head, query) = text.split_once('?')?;
    let mut found = false;
    let parameters: Vec<Cow<'_, str>> = query
        .split('&')
        .map(|parameter| match parameter.split_once('=') {
            Some((name, value)) if is_secret(name) => {
                found = true;
                // What follows the URL in a sentence stays readable.
                let end = value
                    .find(|c: char| c.is_whitespace() || matches!(c, '"' | '\'' | '`'))
                    .unwrap_or(value.len());
                Cow::Owned(format!("{name}={MASK}{}", value.get(end..).unwrap_or_default()))
            }
            _ => Cow::Borrowed(parameter),
        })
        .collect();
    found.then(|| format!("{head}?{}", parameters.join("&")))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_password_in_a_url_is_masked_and_the_rest_kept() {
        assert_eq!(
            mask_urls("postgres://app:hunter2@db:5432/shop?sslmode=require"),
            "postgres://app:***@db:5432/shop?sslmode=require"
        );
        assert_eq!(mask_urls("postgres://app@db/shop"), "postgres://app@db/shop");
        assert_eq!(
            mask_urls("postgres://db/shop?user=app&password=hunter2"),
            "postgres://db/shop?user=app&password=***"
        );
        assert_eq!(
            mask_urls("cannot use 'postgres://a:b@c/d' here"),
            "cannot use 'postgres://a:***@c/d' here"
        );
    }

    #[test]
    fn a_malformed_url_hides_its_password_too() {
        for text in [
            "postgres://app:hunt/er2@db/shop",
            "postgres://app:hunter@2@db:x/",
            "pg://app:hunter2?@",
            "postgres://:hunter2@",
        ] {
            assert!(!mask_urls(text).contains("hunt"), "{}", mask_urls(text));
        }
    }

    #[test]
    fn settings_with_secrets_are_known_by_name() {
        for name in [
            "sasl.password",
            "ssl.key.password",
            "ssl.keystore.password",
            "sasl.oauthbearer.client.secret",
            "ssl.key.pem",
            "sasl.oauthbearer.config",
            "sasl.passwrd",
        ] {
            assert!(is_secret(name), "{name}");
        }
        for name in [
            "compression.type",
            "ssl.key.location",
            "sasl.username",
            "sasl.mechanism",
            "ssl.ca.pem",
            "sasl.oauthbearer.token.endpoint.url",
        ] {
            assert!(!is_secret(name), "{name}");
        }
    }

    proptest! {
        #[test]
        fn no_password_survives(user in "[a-z]{0,8}", password in "Q[^\\s\"'`]{3,20}Q", tail in "[a-z0-9:/]{0,20}") {
            let url = format!("postgres://{user}:{password}@{tail}");
            prop_assert!(!mask_urls(&url).contains(&password));
        }
    }
}
