//! Connections for which a shard has no memory: told why in the first bytes, before anything is kept for them.

use crate::wire::Socket;
use fastps_core::error::Error;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// How long the peer may take to read why.
const LINGER: Duration = Duration::from_secs(1);

/// Says in HTTP/2 why the connection cannot be served, and closes it.
pub(crate) async fn turn_away(mut io: Socket, error: &Error) {
    let work = async {
        io.write_all(&farewell(&error.to_string())).await?;
        io.shutdown().await?;
        // Closing a socket that has unread bytes would reset the connection, and the peer might never read why.
        let mut unread = [0; 1024];
        while io.read(&mut unread).await? > 0 {}
        std::io::Result::Ok(())
    };
    // A peer that is gone or does not listen need not know.
    let _ = tokio::time::timeout(LINGER, work).await;
}

/// Empty SETTINGS, with which every server must begin, and GOAWAY with the reason as debug data (RFC 9113, 6.8).
fn farewell(reason: &str) -> Vec<u8> {
    const GOAWAY: u8 = 7;
    const ENHANCE_YOUR_CALM: u32 = 0xb;
    let reason = &reason.as_bytes()[..reason.floor_char_boundary(512)];
    let mut bytes = vec![0, 0, 0, 4, 0, 0, 0, 0, 0];
    bytes.extend(&(8 + reason.len() as u32).to_be_bytes()[1..]);
    bytes.extend([GOAWAY, 0, 0, 0, 0, 0]);
    // No stream was accepted.
    bytes.extend(0_u32.to_be_bytes());
    bytes.extend(ENHANCE_YOUR_CALM.to_be_bytes());
    bytes.extend(reason);
    bytes
}
