//! Loopback ports that are free now and likely to stay ours.
//!
//! Ports below the kernel's ephemeral range are taken, so that no outgoing connection sits on one while the
//! stack is down, and the search starts at a place that depends on the stack, so that stacks do not collide.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::time::Duration;

use super::wait::{self, Deadline};
use crate::error::{Error, Result};

const FIRST: u16 = 15_000;

/// Different free ports, none of those in `kept`, searched from a start that `seed` decides.
pub(crate) fn choose<const COUNT: usize>(seed: u64, kept: &[u16]) -> Result<[u16; COUNT]> {
    let end = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")
        .ok()
        .and_then(|range| range.split_whitespace().next()?.parse().ok())
        .filter(|first_ephemeral| *first_ephemeral > FIRST + 1000)
        .unwrap_or(32_768);
    let count = u64::from(end - FIRST);
    let free: Vec<u16> = (0..count)
        .filter_map(|step| u16::try_from(u64::from(FIRST) + (seed % count + step) % count).ok())
        .filter(|port| !kept.contains(port) && is_free(*port))
        .take(COUNT)
        .collect();
    free.try_into().map_err(|_| Error::failed(format!("no free port from {FIRST} to {end} on 127.0.0.1")))
}

/// Whether a server could listen there now.
fn is_free(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
}

/// Whether a server could listen there now or soon: one that was just killed holds its port a little longer,
/// and moving to another would leave everybody who knows the old one behind.
pub(crate) fn becomes_free(port: u16) -> bool {
    let deadline = Deadline::after(Duration::from_secs(3));
    while !is_free(port) {
        if deadline.passed() {
            return false;
        }
        wait::briefly();
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chosen_ports_differ_and_skip_taken_ones() {
        let [first, ..] = choose::<3>(7, &[]).unwrap();
        let _taken = TcpListener::bind((Ipv4Addr::LOCALHOST, first)).unwrap();
        let ports = choose::<3>(7, &[]).unwrap();
        assert!(!ports.contains(&first), "{ports:?}");
        assert!(ports[0] != ports[1] && ports[1] != ports[2]);
        assert!(!choose::<3>(7, &ports).unwrap().iter().any(|port| ports.contains(port)));
    }
}
