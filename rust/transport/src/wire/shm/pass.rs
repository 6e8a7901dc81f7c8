//! Passes memory from the server to the client over their Unix socket, before anything else.
//!
//! The client sends [`ASK`]. The server answers with one byte: 0 together with the memory of the rings and
//! perhaps of its values, or the length of the reason why there is none, and the reason.

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{Error, ErrorKind, IoSlice, IoSliceMut, Result};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::UnixStream;

/// A client's request; no HTTP client begins like that.
pub const ASK: &[u8] = b"fastps shared memory 2\n";
/// The longest reason.
const MAX_REASON_BYTES: usize = 255;
/// Most descriptors passed.
const MAX_DESCRIPTORS: usize = 2;
const SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS));

/// Asks the server for memory: of the rings, then of its values, if it lends any. An inner error is the
/// server's reason for a refusal.
pub(super) async fn ask(socket: &mut UnixStream) -> Result<std::result::Result<Vec<OwnedFd>, String>> {
    socket.write_all(ASK).await?;
    let mut bytes = [0; 1 + MAX_REASON_BYTES];
    let (n, memory) = socket.async_io(Interest::READABLE, || receive(socket, &mut bytes)).await?;
    match (&bytes[..n], memory) {
        ([0, ..], memory) if !memory.is_empty() => Ok(Ok(memory)),
        ([n, reason @ ..], memory) if *n > 0 && usize::from(*n) == reason.len() && memory.is_empty() => {
            Ok(Err(String::from_utf8_lossy(reason).into_owned()))
        }
        _ => Err(Error::new(ErrorKind::InvalidData, "the server does not know of shared memory")),
    }
}

/// Answers a client that has asked.
pub(super) async fn answer(
    socket: &UnixStream,
    memory: std::result::Result<&[BorrowedFd<'_>], &str>,
) -> Result<()> {
    let mut bytes = vec![0];
    if let Err(reason) = memory {
        let reason = &reason[..reason.floor_char_boundary(MAX_REASON_BYTES)];
        bytes[0] = reason.len() as u8;
        bytes.extend(reason.as_bytes());
    }
    let sent = socket.async_io(Interest::WRITABLE, || send(socket, &bytes, memory.unwrap_or(&[]))).await?;
    if sent == bytes.len() { Ok(()) } else { Err(ErrorKind::WriteZero.into()) }
}

fn receive(socket: &UnixStream, bytes: &mut [u8]) -> Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    if got.flags.contains(ReturnFlags::CTRUNC) {
        return Err(Error::other("there is no descriptor left for shared memory"));
    }
    let mut memory = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(files) = message {
            memory.extend(files);
        }
    }
    Ok((got.bytes, memory))
}

fn send(socket: &UnixStream, bytes: &[u8], files: &[BorrowedFd<'_>]) -> Result<usize> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(ErrorKind::OutOfMemory.into());
    }
    Ok(sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
}
