//! The run of a command: its options, its answer and its exit status.

use clap::Parser;
use fastps_core::error::Result;
use std::ffi::OsString;
use std::io::Write;

/// Parses the options and runs a command. Returns the exit status: 1 after an error, which is printed, or if
/// the command says no. The first argument is the program's name.
pub(crate) fn run<A: Parser>(
    args: impl IntoIterator<Item = OsString>,
    execute: impl FnOnce(A) -> Result<bool>,
) -> i32 {
    let args = match A::try_parse_from(args) {
        Ok(args) => args,
        Err(error) => {
            let _ = error.print();
            return error.exit_code();
        }
    };
    match execute(args) {
        Ok(yes) => i32::from(!yes),
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "fastps: error: {error}");
            1
        }
    }
}
