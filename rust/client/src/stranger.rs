//! Finds out who answers at an address where no server of fastps does.

use fastps_core::error::{Error, Kind};
use fastps_transport::convert;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// How long a stranger may take to answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// A TLS record with an empty handshake, which a server with TLS answers with an alert; to all others it is a
/// line that they do not understand.
const QUESTION: &[u8] = b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00 / HTTP/1.1\r\n\r\n";
/// The first bytes of TLS records: an alert, a handshake.
const TLS: [u8; 2] = [0x15, 0x16];
/// Most bytes of an answer that are shown.
const SHOWN: usize = 60;

/// The error of an address where something else answers; `None`: nothing does, or it may be a server.
pub(crate) async fn stranger(address: &str, with_tls: bool) -> Option<Error> {
    let answer = timeout(PATIENCE, first_words(address)).await.ok()??;
    if TLS.contains(answer.first()?) {
        return (!with_tls).then(convert::plain_text);
    }
    let line: String =
        answer.iter().map(|byte| char::from(*byte)).take_while(|c| *c != '\r' && *c != '\n').collect();
    if line.is_empty() || !line.chars().all(|c| c.is_ascii_graphic() || c == ' ') {
        return None;
    }
    let got = match line.split(' ').collect::<Vec<_>>()[..] {
        [version, status, ..] if version.starts_with("HTTP/") => {
            format!("a web server that answers {version} {status}")
        }
        _ => format!("another program that answers {line:?}"),
    };
    let error = Error::new(Kind::Config, "no server of fastps listens there; check host and port");
    Some(error.expected("a server of fastps", got))
}

async fn first_words(address: &str) -> Option<Vec<u8>> {
    let mut stream = TcpStream::connect(address).await.ok()?;
    stream.write_all(QUESTION).await.ok()?;
    let mut answer = Vec::new();
    // What came before the connection broke counts.
    let _ = stream.take(SHOWN as u64).read_to_end(&mut answer).await;
    Some(answer)
}
