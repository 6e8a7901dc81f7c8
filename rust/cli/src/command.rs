//! The run of a command: its options, its output and its exit status. Everything that it prints is printable:
//! names and errors may come from others.

use clap::Parser;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::text::{printable, without_secrets};
use serde::Serialize;
use std::borrow::Cow;
use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, ErrorKind, Write};

/// Exit status when the reader of the output is gone, as a shell reports SIGPIPE.
const PIPE_CLOSED: i32 = 128 + 13;

/// Explains wrong options, or shows the help, and returns the exit status. A secret in the place of an option's
/// value is left out.
pub(crate) fn refuse(error: &clap::Error) -> i32 {
    let _ = match without_secrets(&error.to_string()) {
        Cow::Borrowed(_) => error.print(),
        Cow::Owned(text) => write!(std::io::stderr(), "{text}"),
    };
    error.exit_code()
}

/// Parses the options and runs a command. Returns the exit status: 1 after an error, which is printed, or if
/// the command says no. The first argument is the program's name.
pub(crate) fn run<A: Parser>(
    args: impl IntoIterator<Item = OsString>,
    execute: impl FnOnce(A) -> Result<bool>,
) -> i32 {
    run_to_status(args, |args| match execute(args) {
        Ok(yes) => i32::from(!yes),
        Err(error) => failed(&error),
    })
}

/// As [`run`], for a command that shows lines. If their reader is gone, the exit status says so.
pub(crate) fn show<A: Parser>(
    args: impl IntoIterator<Item = OsString>,
    look: impl FnOnce(A) -> Result<(Vec<String>, bool)>,
) -> i32 {
    run_to_status(args, |args| match look(args) {
        Ok((lines, yes)) => put(&lines).unwrap_or(i32::from(!yes)),
        Err(error) => {
            note(&error);
            1
        }
    })
}

/// Parses the options and runs a command, which returns the exit status.
pub(crate) fn run_to_status<A: Parser>(
    args: impl IntoIterator<Item = OsString>,
    execute: impl FnOnce(A) -> i32,
) -> i32 {
    match A::try_parse_from(args) {
        Ok(args) => execute(args),
        Err(error) => refuse(&error),
    }
}

/// Prints an error, and returns the exit status.
pub(crate) fn failed(error: &Error) -> i32 {
    note(format_args!("error: {error}"));
    1
}

/// Prints a line to standard error.
pub(crate) fn note(text: impl Display) {
    let _ = writeln!(io::stderr(), "fastps: {}", printable(&text.to_string()));
}

/// Prints lines to standard output. Returns the exit status if that is not possible.
pub(crate) fn put(lines: &[String]) -> Option<i32> {
    match write(lines) {
        Ok(()) => None,
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Some(PIPE_CLOSED),
        Err(error) => {
            note(format_args!("cannot print: {error}"));
            Some(1)
        }
    }
}

/// Prints lines to standard output. A reader that closes the pipe has read enough.
pub(crate) fn say(lines: &[String]) -> Result<()> {
    match write(lines) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Error::new(Kind::Internal, format!("cannot print: {error}")))
        }
        _ => Ok(()),
    }
}

fn write(lines: &[String]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    lines.iter().try_for_each(|line| writeln!(out, "{}", printable(line))).and_then(|()| out.flush())
}

pub(crate) fn in_json(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|error| Error::new(Kind::Internal, error.to_string()))
}
