//! Times as Baton's headers show them: RFC 3339 in UTC with milliseconds, always 24 characters
//! (`2026-01-31T09:05:00.250Z`), so that they also sort as text.
//!
//! What RFC 3339 cannot say, a year before 0 or after 9999, has no text: `None`.

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// Text of a point in time, cut to whole milliseconds.
pub(crate) fn from_time(at: OffsetDateTime) -> Option<String> {
    let utc = at.checked_to_utc()?;
    let (year, month, day) = utc.to_calendar_date();
    let (hour, minute, second, milli) = utc.as_hms_milli();
    let month = u8::from(month);
    (0..=9999)
        .contains(&year)
        .then(|| format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{milli:03}Z"))
}

/// Text of a point in time given in milliseconds since 1970-01-01 UTC, as a record's timestamp is.
pub(crate) fn from_millis(ms: i64) -> Option<String> {
    let at = OffsetDateTime::from_unix_timestamp_nanos(i128::from(ms) * 1_000_000).ok()?;
    from_time(at)
}

/// A point in time as RFC 3339 says it, in any zone.
pub(crate) fn to_time(text: &str) -> Option<OffsetDateTime> {
    OffsetDateTime::parse(text, &Rfc3339).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_always_has_24_characters_and_milliseconds() {
        for (ms, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (1_769_850_300_250, "2026-01-31T09:05:00.250Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (-1, "1969-12-31T23:59:59.999Z"),
            (253_402_300_799_999, "9999-12-31T23:59:59.999Z"),
        ] {
            assert_eq!(from_millis(ms).as_deref(), Some(text));
        }
    }

    #[test]
    fn a_year_that_rfc_3339_cannot_say_has_no_text() {
        assert_eq!(from_millis(253_402_300_800_000), None);
        assert_eq!(from_millis(i64::MAX), None);
        assert_eq!(from_millis(i64::MIN), None);
    }

    #[test]
    fn what_is_written_is_read_back_and_other_zones_are_read_too() {
        let at = OffsetDateTime::from_unix_timestamp_nanos(1_769_850_300_250_000_000).unwrap();
        assert_eq!(to_time("2026-01-31T09:05:00.250Z"), Some(at));
        assert_eq!(to_time("2026-01-31T10:05:00.250+01:00"), Some(at));
        assert_eq!(to_time("yesterday"), None);
    }

    #[test]
    fn a_time_of_another_zone_is_shown_in_utc() {
        let east = time::UtcOffset::from_hms(5, 45, 0).unwrap();
        let at = OffsetDateTime::from_unix_timestamp(1_769_850_300).unwrap().to_offset(east);
        assert_eq!(from_time(at).as_deref(), Some("2026-01-31T09:05:00.000Z"));
    }
}
