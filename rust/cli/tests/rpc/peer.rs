//! A native client made of plain `h2`, so that tests control every byte.

use crate::stubs::{signed, within};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use fastps_proto::v1 as pb;
use fastps_transport::convert::{self, Answer};
use h2::client::{Builder, ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use http::{HeaderMap, Request};
use prost::Message;
use tokio::net::TcpStream;

pub(crate) const EXCHANGE: &str = "/fastps.v1.Data/Exchange";
/// The setting by which a server recognizes a native client (see `protos/README.md`).
const NATIVE: u32 = 0x6670_7331;

/// A native connection with this window for each stream and for the whole connection.
pub(crate) async fn connect(address: &str, window: u32) -> SendRequest<Bytes> {
    connect_marked(address, window, NATIVE).await
}

/// A connection with this setting; only [`NATIVE`] makes it a native one.
pub(crate) async fn connect_marked(address: &str, window: u32, mark: u32) -> SendRequest<Bytes> {
    let socket = within(TcpStream::connect(address)).await.unwrap();
    socket.set_nodelay(true).unwrap();
    let mut builder = Builder::new();
    builder.max_header_list_size(mark).initial_window_size(window).enable_push(false);
    let (requests, connection) = within(builder.handshake(socket)).await.unwrap();
    tokio::spawn(connection);
    requests
}

pub(crate) fn call(requests: &mut SendRequest<Bytes>, path: &str) -> (ResponseFuture, SendStream<Bytes>) {
    call_as(requests, path, signed(()).into_parts().0.into_headers())
}

/// As [`call`], with these headers.
pub(crate) fn call_as(
    requests: &mut SendRequest<Bytes>,
    path: &str,
    headers: HeaderMap,
) -> (ResponseFuture, SendStream<Bytes>) {
    let request = Request::post(format!("http://fastps{path}")).header("content-type", "application/grpc");
    let mut request = request.body(()).unwrap();
    request.headers_mut().extend(headers);
    requests.send_request(request, false).unwrap()
}

/// A stream whose answers are read with pauses, `window` bytes at a time.
pub(crate) struct Answers {
    pub(crate) stream: RecvStream,
    bytes: BytesMut,
}

impl Answers {
    pub(crate) async fn of(response: ResponseFuture) -> Self {
        let response = within(response).await.unwrap();
        assert_eq!(response.status(), 200);
        assert!(response.headers().contains_key("fastps-server"));
        Self { stream: response.into_body(), bytes: BytesMut::new() }
    }

    pub(crate) async fn next(&mut self) -> (u64, Answer) {
        loop {
            if self.bytes.len() >= 5 {
                let length = (&self.bytes[1..5]).get_u32() as usize;
                if self.bytes.len() >= 5 + length {
                    let mut message = self.bytes.split_to(5 + length).freeze();
                    message.advance(5);
                    return convert::answer_from_frame(pb::Frame::decode(message).unwrap()).unwrap();
                }
            }
            let data = within(self.stream.data()).await.unwrap().unwrap();
            self.stream.flow_control().release_capacity(data.len()).unwrap();
            self.bytes.extend_from_slice(&data);
        }
    }
}

pub(crate) fn message(frame: &impl Message) -> Bytes {
    let mut bytes = BytesMut::new();
    bytes.put_u8(0);
    bytes.put_u32(frame.encoded_len() as u32);
    frame.encode(&mut bytes).unwrap();
    bytes.freeze()
}

pub(crate) fn status(headers: &HeaderMap) -> &str {
    headers.get("grpc-status").unwrap().to_str().unwrap()
}
