//! Sizes in bytes as people write them: `16MiB`, `64 kB`, `1048576`.

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

/// Largest binary unit first, so that printing finds the shortest form; decimal ones are only read.
const UNITS: [(&str, usize); 8] = [
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("B", 1),
    ("", 1),
    ("kB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
];

/// A number of bytes, at least 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Size(pub(crate) NonZeroUsize);

/// Why a text is no size.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum ParseSizeError {
    #[error(
        "`{0}` is not a size; write a whole number and a unit (B, kB, KiB, MB, MiB, GB, GiB), like 16MiB"
    )]
    Malformed(String),
    #[error("must be at least 1B")]
    Zero,
    #[error("`{0}` is larger than a size can be")]
    TooLarge(String),
}

impl FromStr for Size {
    type Err = ParseSizeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let malformed = || ParseSizeError::Malformed(text.to_owned());
        let trimmed = text.trim();
        let digits = trimmed.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = trimmed.split_at(digits);
        if number.is_empty() {
            return Err(malformed());
        }
        let bytes = UNITS.iter().find(|(name, _)| *name == unit.trim_start()).ok_or_else(malformed)?.1;
        let number = number.parse::<usize>().ok().and_then(|n| n.checked_mul(bytes));
        let number = number.ok_or_else(|| ParseSizeError::TooLarge(text.to_owned()))?;
        NonZeroUsize::new(number).map(Self).ok_or(ParseSizeError::Zero)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0.get();
        let exact = UNITS.iter().find(|(_, unit)| bytes.is_multiple_of(*unit));
        let (name, unit) = exact.copied().unwrap_or(("B", 1));
        write!(f, "{}{name}", bytes / unit)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_usual_forms_are_read() {
        for (text, bytes) in
            [("16MiB", 16 << 20), ("16 MiB", 16 << 20), ("64kB", 64_000), ("1048576", 1 << 20), ("7B", 7)]
        {
            assert_eq!(text.parse::<Size>().unwrap().0.get(), bytes, "{text}");
        }
    }

    #[test]
    fn nonsense_and_zero_are_refused() {
        for text in ["", "MiB", "-1B", "1.5MiB", "16mib", "16 M"] {
            assert!(matches!(text.parse::<Size>(), Err(ParseSizeError::Malformed(_))), "{text}");
        }
        assert_eq!("0".parse::<Size>(), Err(ParseSizeError::Zero));
        assert!(matches!("99999999999GiB".parse::<Size>(), Err(ParseSizeError::TooLarge(_))));
    }

    proptest! {
        #[test]
        fn what_is_printed_reads_back_the_same(bytes in 1..=usize::MAX) {
            let size = Size(NonZeroUsize::new(bytes).unwrap());
            prop_assert_eq!(size.to_string().parse::<Size>(), Ok(size));
        }
    }
}
