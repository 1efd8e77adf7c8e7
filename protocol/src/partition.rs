//! On which partition a key lives: where Kafka's Java clients look for it.
//!
//! The relay names the partition of every record that has a key, because what may follow a record depends on it (see the
//! relay's `route`), and because a raised number of partitions is then seen before it scatters a key. The hash is the one
//! of Kafka's default partitioner (`murmur2`, the name of librdkafka's setting is `murmur2_random`). A public format.

use std::num::NonZeroU32;

const SEED: u32 = 0x9747_b28c;
const M: u32 = 0x5bd1_e995;

/// The partition of a key, from 0, in a topic of so many partitions. An empty key is a key.
#[must_use]
pub fn of_key(key: &[u8], partitions: NonZeroU32) -> u32 {
    (murmur2(key) & 0x7fff_ffff) % partitions
}

/// `MurmurHash2`, 32 bits, little-endian, with the seed that Kafka uses.
fn murmur2(data: &[u8]) -> u32 {
    let scrambled = |word: u32| {
        let k = word.wrapping_mul(M);
        (k ^ (k >> 24)).wrapping_mul(M)
    };
    // Kafka hashes lengths of 32 bits; keys are far shorter.
    #[expect(clippy::cast_possible_truncation, reason = "the length enters the hash modulo 2^32")]
    let mut hash = SEED ^ data.len() as u32;
    let (words, rest) = data.as_chunks::<4>();
    for word in words {
        hash = hash.wrapping_mul(M) ^ scrambled(u32::from_le_bytes(*word));
    }
    if !rest.is_empty() {
        let tail = rest.iter().rev().fold(0, |tail, byte| (tail << 8) | u32::from(*byte));
        hash = (hash ^ tail).wrapping_mul(M);
    }
    hash = (hash ^ (hash >> 13)).wrapping_mul(M);
    hash ^ (hash >> 15)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values that Kafka's own test of its hash expects (`UtilsTest.testMurmur2`, Apache Kafka), as signed integers.
    #[test]
    fn the_hash_is_the_one_of_the_java_client() {
        for (key, expected) in [
            ("21", -973_932_308),
            ("foobar", -790_332_482),
            ("a-little-bit-long-string", -985_981_536),
            ("a-little-bit-longer-string", -1_486_304_829),
            ("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58_897_971),
            ("abc", 479_470_107),
        ] {
            assert_eq!(murmur2(key.as_bytes()).cast_signed(), expected, "{key}");
        }
    }

    #[test]
    fn every_key_has_a_partition_of_the_topic() {
        let twelve = NonZeroU32::new(12).unwrap();
        for length in 0..40 {
            assert!(of_key(&vec![0xff; length], twelve) < 12);
        }
        assert_eq!(of_key(b"foobar", NonZeroU32::MIN), 0);
    }
}
