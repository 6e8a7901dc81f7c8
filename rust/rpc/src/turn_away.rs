//! Connections that are not served, because there is no memory or because they speak the wrong language: told why in the
//! first bytes, before anything is kept for them.

use crate::wire::Socket;
use fastps_core::error::{Error, Kind};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// How long the peer may take to read why.
const LINGER: Duration = Duration::from_secs(1);

/// HTTP/2's codes (RFC 9113, 7).
const ENHANCE_YOUR_CALM: u32 = 0xb;
const INADEQUATE_SECURITY: u32 = 0xc;

/// Says in HTTP/2 why the connection cannot be served, and closes it.
pub(crate) async fn turn_away(mut io: Socket, error: &Error) {
    let reason = match error.kind {
        Kind::Capacity => ENHANCE_YOUR_CALM,
        _ => INADEQUATE_SECURITY,
    };
    let farewell = farewell(reason, &error.to_string());
    let work = async {
        // A peer that is gone or does not listen need not know.
        let _ = io.write_all(&farewell).await;
        linger(&mut io).await;
    };
    let _ = tokio::time::timeout(LINGER, work).await;
}

/// Ends a connection so that the peer reads what it was told: closing a socket that has unread bytes would reset the connection.
pub(crate) async fn linger(io: &mut (impl AsyncRead + AsyncWrite + Unpin)) {
    let work = async {
        io.shutdown().await?;
        let mut unread = [0; 1024];
        while io.read(&mut unread).await? > 0 {}
        std::io::Result::Ok(())
    };
    let _ = tokio::time::timeout(LINGER, work).await;
}

/// Empty SETTINGS, with which every server must begin, and GOAWAY with the reason as debug data (RFC 9113, 6.8).
fn farewell(code: u32, reason: &str) -> Vec<u8> {
    const GOAWAY: u8 = 7;
    let reason = &reason.as_bytes()[..reason.floor_char_boundary(512)];
    let mut bytes = vec![0, 0, 0, 4, 0, 0, 0, 0, 0];
    bytes.extend(&(8 + reason.len() as u32).to_be_bytes()[1..]);
    bytes.extend([GOAWAY, 0, 0, 0, 0, 0]);
    // No stream was accepted.
    bytes.extend(0_u32.to_be_bytes());
    bytes.extend(code.to_be_bytes());
    bytes.extend(reason);
    bytes
}
