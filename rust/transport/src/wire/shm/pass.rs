//! Passes memory from the server to the client over their Unix socket, before anything else.
//!
//! The client sends [`ASK`], what shows who it is, if anything, a space if it lets the rings grow (which earlier
//! servers skip), and a line feed. The server answers with one
//! byte: 0 together with the memory of the rings, or the length of the reason why there is none, and the
//! reason. Later, it passes files with values, and the memory of larger rings, beside bytes that wake the client.

use http::HeaderValue;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{Error, ErrorKind, IoSlice, IoSliceMut, Result};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::UnixStream;

/// Start of a client's request; no HTTP client begins like that.
pub const ASK: &[u8] = b"fastps shared memory 3";
/// End of the request of a client that lets the rings grow.
pub const GROWS: &[u8] = b" ";
/// The bytes beside a file with values, and beside larger memory of the rings.
const VALUES: u8 = 0;
const RINGS: u8 = 1;
/// The longest reason.
const MAX_REASON_BYTES: usize = 255;
const SPACE: usize = rustix::cmsg_space!(ScmRights(1));

/// Asks the server for the memory of the rings. An inner error is the server's reason for a refusal.
pub(super) async fn ask(
    socket: &mut UnixStream,
    token: Option<&HeaderValue>,
) -> Result<std::result::Result<OwnedFd, String>> {
    let token = token.map_or(&b""[..], HeaderValue::as_bytes);
    socket.write_all(&[ASK, b" ", token, GROWS, b"\n"].concat()).await?;
    let mut bytes = [0; 1 + MAX_REASON_BYTES];
    let (n, memory) = socket.async_io(Interest::READABLE, || receive(&socket, &mut bytes)).await?;
    match (&bytes[..n], memory) {
        ([0], Some(memory)) => memory.map(Ok),
        ([n, reason @ ..], None) if *n > 0 && usize::from(*n) == reason.len() => {
            Ok(Err(String::from_utf8_lossy(reason).into_owned()))
        }
        _ => Err(Error::new(ErrorKind::InvalidData, "the server does not know of shared memory")),
    }
}

/// Answers a client that has asked.
pub(super) async fn answer(
    socket: &UnixStream,
    memory: std::result::Result<BorrowedFd<'_>, &str>,
) -> Result<()> {
    let mut bytes = vec![0];
    if let Err(reason) = memory {
        let reason = &reason[..reason.floor_char_boundary(MAX_REASON_BYTES)];
        bytes[0] = reason.len() as u8;
        bytes.extend(reason.as_bytes());
    }
    let sent = socket.async_io(Interest::WRITABLE, || send(socket, &bytes, memory.ok())).await?;
    if sent == bytes.len() { Ok(()) } else { Err(ErrorKind::WriteZero.into()) }
}

/// Passes a file with values to a client with rings, unless its socket is full.
pub(super) fn hand(socket: impl AsFd, file: BorrowedFd<'_>) -> Result<()> {
    send(socket, &[VALUES], Some(file)).map(|_| ())
}

/// Passes larger memory of the rings to a client, unless its socket is full.
pub(super) fn hand_rings(socket: impl AsFd, memory: BorrowedFd<'_>) -> Result<()> {
    send(socket, &[RINGS], Some(memory)).map(|_| ())
}

/// Returns whether the file beside these bytes is memory of rings. The last byte is the one that it came with.
pub(super) fn is_rings(bytes: &[u8]) -> bool {
    bytes.last() == Some(&RINGS)
}

/// Receives bytes, and the file beside them if there is one; an inner error says why this process has none.
pub(super) fn receive(socket: impl AsFd, bytes: &mut [u8]) -> Result<(usize, Option<Result<OwnedFd>>)> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags)?;
    if got.flags.contains(ReturnFlags::CTRUNC) {
        return Ok((got.bytes, Some(Err(Error::other("there is no descriptor left for shared memory")))));
    }
    let mut file = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(files) = message {
            file = files.last().map(Ok);
        }
    }
    Ok((got.bytes, file))
}

fn send(socket: impl AsFd, bytes: &[u8], file: Option<BorrowedFd<'_>>) -> Result<usize> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = file.as_slice();
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(ErrorKind::OutOfMemory.into());
    }
    Ok(sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?)
}
