//! The records of a page, as Postgres's `record_send` writes them one after the other into one value. Pure.
//!
//! ```text
//!   record   number of fields │ field, field, …             numbers are big-endian
//!   field    its type (4 bytes) │ its length, -1 for null │ its bytes, as its type is sent
//! ```
//!
//! One value for all rows of a page, because a row of its own costs Postgres as much to send as to find, and the driver as much
//! to take apart. A record that is not what the statement asks for is an error; nothing of its page is used then.

/// Why bytes are not records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Malformed {
    #[error("a record ends in the middle")]
    Short,
    #[error("a record has {found} fields instead of {expected}")]
    Fields { found: i32, expected: usize },
    #[error("a field has the length {0}")]
    Length(i32),
}

/// Where a field's bytes lie in the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    from: u32,
    /// `u32::MAX`: the field is null.
    length: u32,
}

impl Place {
    const NULL: Self = Self { from: 0, length: u32::MAX };

    /// The field's bytes, in the value that it was found in. `None`: it is null.
    pub(crate) fn of(self, value: &[u8]) -> Option<&[u8]> {
        if self == Self::NULL {
            return None;
        }
        value.get(self.from as usize..)?.get(..self.length as usize)
    }

    /// How many bytes there are.
    pub(crate) fn len(self) -> usize {
        if self == Self::NULL { 0 } else { self.length as usize }
    }

    pub(crate) fn is_null(self) -> bool {
        self == Self::NULL
    }
}

/// The records of a value, each as the places of its `N` fields.
pub(crate) struct Records<'a, const N: usize> {
    value: &'a [u8],
    at: usize,
}

impl<'a, const N: usize> Records<'a, N> {
    pub(crate) fn of(value: &'a [u8]) -> Self {
        Self { value, at: 0 }
    }

    fn number(&mut self) -> Result<i32, Malformed> {
        let found = self.value.get(self.at..).and_then(|rest| rest.first_chunk()).ok_or(Malformed::Short)?;
        self.at += 4;
        Ok(i32::from_be_bytes(*found))
    }

    fn field(&mut self) -> Result<Place, Malformed> {
        self.number()?;
        let length = self.number()?;
        if length == -1 {
            return Ok(Place::NULL);
        }
        let length = u32::try_from(length).map_err(|_| Malformed::Length(length))?;
        let from = u32::try_from(self.at).map_err(|_| Malformed::Short)?;
        self.at += length as usize;
        if self.at > self.value.len() { Err(Malformed::Short) } else { Ok(Place { from, length }) }
    }

    fn record(&mut self) -> Result<[Place; N], Malformed> {
        let found = self.number()?;
        if usize::try_from(found) != Ok(N) {
            return Err(Malformed::Fields { found, expected: N });
        }
        let mut fields = [Place::NULL; N];
        for field in &mut fields {
            *field = self.field()?;
        }
        Ok(fields)
    }
}

impl<const N: usize> Iterator for Records<'_, N> {
    type Item = Result<[Place; N], Malformed>;

    /// After an error nothing more comes.
    fn next(&mut self) -> Option<Self::Item> {
        if self.at >= self.value.len() {
            return None;
        }
        let record = self.record();
        if record.is_err() {
            self.at = self.value.len();
        }
        Some(record)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// As the documentation of `record_send`'s source has it.
    fn sent(records: &[[Option<Vec<u8>>; 3]]) -> Vec<u8> {
        let mut value = Vec::new();
        for record in records {
            value.extend(3_i32.to_be_bytes());
            for field in record {
                value.extend(17_i32.to_be_bytes());
                match field {
                    None => value.extend((-1_i32).to_be_bytes()),
                    Some(bytes) => {
                        value.extend(i32::try_from(bytes.len()).unwrap().to_be_bytes());
                        value.extend(bytes);
                    }
                }
            }
        }
        value
    }

    proptest! {
        #[test]
        fn what_was_sent_is_read(records in prop::collection::vec(prop::array::uniform3(prop::option::of(prop::collection::vec(any::<u8>(), 0..40))), 0..8)) {
            let value = sent(&records);
            let read: Vec<[Option<Vec<u8>>; 3]> =
                Records::<3>::of(&value).map(|record| record.unwrap().map(|place| place.of(&value).map(<[u8]>::to_vec))).collect();
            prop_assert_eq!(read, records);
        }

        #[test]
        fn what_is_cut_off_is_an_error_and_never_a_record(cut in 1_usize..34) {
            let value = sent(&[[Some(vec![1; 10]), None, Some(vec![2; 3])]]);
            let cut = &value[..value.len() - cut];
            let read: Vec<_> = Records::<3>::of(cut).collect();
            prop_assert_eq!(read, vec![Err(Malformed::Short)]);
        }

        #[test]
        fn any_bytes_at_all_are_taken_apart_or_refused(value in prop::collection::vec(any::<u8>(), 0..200)) {
            for record in Records::<3>::of(&value).flatten() {
                for place in record {
                    prop_assert_eq!(place.is_null(), place.of(&value).is_none());
                }
            }
        }
    }

    #[test]
    fn another_number_of_fields_and_a_negative_length_are_told() {
        let mut value = sent(&[[None, None, None]]);
        value[3] = 4;
        assert_eq!(Records::<3>::of(&value).next(), Some(Err(Malformed::Fields { found: 4, expected: 3 })));
        let mut value = sent(&[[None, None, None]]);
        value[11] = 0xfe;
        assert_eq!(Records::<3>::of(&value).next(), Some(Err(Malformed::Length(-2))));
    }
}
