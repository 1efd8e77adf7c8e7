//! Durations as people write them: `500ms`, `30s`, `6h`.
//!
//! A whole number and a unit; nothing is guessed, so a bare `10` is refused rather than taken for seconds or milliseconds.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Largest first, so that printing finds the shortest form.
const UNITS: [(&str, u64); 6] = [
    ("d", 86_400_000_000),
    ("h", 3_600_000_000),
    ("m", 60_000_000),
    ("s", 1_000_000),
    ("ms", 1_000),
    ("us", 1),
];

/// A length of time with microsecond resolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Span(pub(crate) Duration);

/// Why a text is no duration.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum ParseSpanError {
    #[error("`{0}` has no unit; write a duration like 500ms, 30s or 6h")]
    NoUnit(String),
    #[error(
        "`{0}` is not a duration; write a whole number and a unit (us, ms, s, m, h, d), like 500ms, 30s or 6h"
    )]
    Malformed(String),
    #[error("`{0}` is longer than a duration can be")]
    TooLong(String),
}

impl FromStr for Span {
    type Err = ParseSpanError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let malformed = || ParseSpanError::Malformed(text.to_owned());
        let trimmed = text.trim();
        let digits = trimmed.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = trimmed.split_at(digits);
        if number.is_empty() {
            return Err(malformed());
        }
        let unit = unit.trim_start();
        if unit.is_empty() {
            return Err(ParseSpanError::NoUnit(text.to_owned()));
        }
        let micros = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(malformed)?.1;
        let number = number.parse::<u64>().ok().and_then(|n| n.checked_mul(micros));
        number.map(|n| Self(Duration::from_micros(n))).ok_or_else(|| ParseSpanError::TooLong(text.to_owned()))
    }
}

/// The shortest exact form: the largest unit that divides it.
impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.0.as_micros();
        if micros == 0 {
            return f.write_str("0s");
        }
        let exact = UNITS.iter().find(|(_, unit)| micros.is_multiple_of(u128::from(*unit)));
        let (name, unit) = exact.copied().unwrap_or(("us", 1));
        write!(f, "{}{name}", micros / u128::from(unit))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_usual_forms_are_read() {
        for (text, millis) in [
            ("500ms", 500),
            ("30s", 30_000),
            ("6h", 21_600_000),
            ("1m", 60_000),
            ("2d", 172_800_000),
            (" 10 s ", 10_000),
        ] {
            assert_eq!(text.parse::<Span>(), Ok(Span(Duration::from_millis(millis))), "{text}");
        }
    }

    #[test]
    fn a_number_without_a_unit_is_refused_with_an_example() {
        let error = "10".parse::<Span>().unwrap_err();
        assert_eq!(error.to_string(), "`10` has no unit; write a duration like 500ms, 30s or 6h");
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "s", "-5s", "1.5s", "5 weeks", "5S", "1h30m"] {
            assert!(matches!(text.parse::<Span>(), Err(ParseSpanError::Malformed(_))), "{text}");
        }
        assert!(matches!("99999999999999999999d".parse::<Span>(), Err(ParseSpanError::TooLong(_))));
        assert!(matches!("18446744073709551615h".parse::<Span>(), Err(ParseSpanError::TooLong(_))));
    }

    proptest! {
        #[test]
        fn what_is_printed_reads_back_the_same(micros in any::<u64>()) {
            let span = Span(Duration::from_micros(micros));
            prop_assert_eq!(span.to_string().parse::<Span>(), Ok(span));
        }
    }
}
