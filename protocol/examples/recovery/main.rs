//! The story of a worker that dies, in logical time, over the very rules that the relay and the inbox obey.
//!
//! ```sh
//! cargo run --example recovery -p baton-protocol
//! ```
//!
//! One line a check, `name: value`; the last says whether all are as they must be. The same story on a real database,
//! with processes that are killed and stopped, is told by the end-to-end tests.

mod story;

use std::process::ExitCode;

fn main() -> ExitCode {
    let told = story::tell();
    println!("{}", told.text());
    if told.holds() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
