//! A session belongs to its client: a caller that knows the incarnation but not the secret is refused, on
//! native and on plain connections, before and after a kill of the server.

use crate::durable::{self, Served};
use crate::ledger::{PATIENT, gradient};
use crate::peer::{Answers, EXCHANGE, call_as, connect, message};
use crate::proxy::Proxies;
use crate::stubs::{CLIENT, Shard, bytes, error, hello, push, start, timed};
use bytes::Bytes;
use fastps_client::Ack;
use fastps_core::dtype::View;
use fastps_core::error::Kind;
use fastps_core::tensor::{SliceId, TensorSpec};
use fastps_core::verbs::PushError;
use fastps_core::verbs::prelude::*;
use fastps_proto::v1 as pb;
use fastps_transport::convert::{self, Answer, Read, Route};
use http::HeaderMap;
use tonic::Request;
use tonic::metadata::BinaryMetadataValue;

const OTHER: [u8; 16] = [7; 16];

/// Secrets of a stranger's requests: none, an invalid one, another one.
fn metadata() -> [Request<()>; 3] {
    let with = |value| {
        let mut request = Request::new(());
        request.metadata_mut().insert_bin("fastps-secret-bin", value);
        request
    };
    [
        Request::new(()),
        with(BinaryMetadataValue::from_bytes(b"")),
        with(BinaryMetadataValue::from_bytes(&OTHER)),
    ]
}

/// Frames of every kind in the victim's name; the query would fence its next push.
fn frames(route: Route, slice: u64, next: u64) -> Vec<pb::Frame> {
    let read = |what| convert::read_frame(9, route, SliceId(slice), what);
    vec![
        convert::resolve_frame(9, route, SliceId(slice), next + 1),
        push(route, slice, next, &[5.0; 3]),
        read(Read::Values),
        read(Read::State),
        read(Read::Version),
    ]
}

async fn is_locked_out(address: &str, route: Route, slice: u64, next: u64) {
    for stranger in metadata() {
        let headers: HeaderMap = stranger.into_parts().0.into_headers();
        let mut requests = connect(address, 65_535).await;
        let (response, mut sending) = call_as(&mut requests, EXCHANGE, headers);
        let mut answers = Answers::of(response).await;
        for frame in frames(route, slice, next) {
            sending.send_data(message(&frame), false).unwrap();
            let (_, answer) = answers.next().await;
            assert!(matches!(&answer, Answer::Refused(error) if error.kind == Kind::Denied), "{answer:?}");
        }
    }
    let mut stranger = Shard::over_without_hello(address).await;
    for renew in [true, false] {
        let taking = pb::HelloRequest { renew, secret: Bytes::from_static(&OTHER), ..hello(CLIENT) };
        let refused = stranger.control.hello(Request::new(taking)).await.unwrap_err();
        assert_eq!(error(refused).kind, Kind::Denied);
    }
    let leave = pb::LeaveRequest { client: CLIENT, group: route.group, warm: false };
    assert_eq!(error(stranger.control.leave(Request::new(leave)).await.unwrap_err()).kind, Kind::Denied);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_secret_outlives_a_server_that_is_killed() {
    let mut served = Served::new(1);
    served.start();
    let address = served.address();
    let logged = pb::HelloRequest { ack: pb::Ack::Logged.into(), ..hello(CLIENT) };
    let mut shard = Shard::connect(&address, CLIENT).await;
    // When a push is answered, it and everything before it are in the log.
    shard.control.hello(timed(logged)).await.unwrap();
    let mut stream = shard.exchange().await;
    let (route, slice) = shard.create(&mut stream, "w", &[0.0; 3]).await;
    for killed in [false, true] {
        let next = 1 + u64::from(killed);
        is_locked_out(&address, route, slice, next).await;
        if killed {
            // The client itself continues where it was.
            shard = Shard::over_without_hello(&address).await;
            let renewed = pb::HelloRequest { renew: true, ..hello(CLIENT) };
            shard.control.hello(timed(renewed)).await.unwrap();
            stream = shard.exchange().await;
        }
        let answer = stream.ask(push(route, slice, next, &[-1.0; 3])).await;
        assert!(matches!(&answer, Answer::Receipt(applied) if !applied.duplicate), "{answer:?}");
        assert_eq!(stream.pull(route, slice).await.1, bytes(&[next as f32; 3]));
        if !killed {
            served.kill();
            served.start();
        }
    }
    let again = stream.ask(push(route, slice, 1, &[-1.0; 3])).await;
    assert!(matches!(&again, Answer::Receipt(applied) if applied.duplicate), "{again:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn neither_statistics_nor_debug_output_tell_an_incarnation() {
    let (server, mut shard, _stream) = start().await;
    let said = format!("{:?}", hello(CLIENT));
    assert!(
        said.contains("renew") && !said.contains("secret") && !said.contains(&CLIENT.to_string()),
        "{said}"
    );
    let sessions =
        shard.control.stats(timed(pb::StatsRequest::default())).await.unwrap().into_inner().sessions;
    let number = shard.control.hello(timed(hello(CLIENT))).await.unwrap().into_inner().session;
    assert_eq!(sessions.iter().map(|session| session.number).collect::<Vec<_>>(), [number]);
    drop(server);
}

/// A server that restarts without its state accepts any incarnation from any client. A client whose
/// incarnation a stranger took learns that its tensors are gone.
#[test]
fn a_client_whose_incarnation_was_taken_is_fenced() {
    // The stranger's session does not expire during the test.
    const LONG: [&str; 2] = ["--lease-ms", "3600000"];
    let mut served = Served::new(1);
    served.start_after("", &LONG);
    let proxies = Proxies::start(&[served.address()], 1);
    let client = durable::connect(&proxies.addresses()[0], Ack::Logged);
    let register = || {
        let spec = TensorSpec::new("w", [3], durable::sgd());
        client.register(spec, View::Float32(&[0.0; 3]), PATIENT)
    };
    register().unwrap();
    proxies.set_down(true);
    served.kill();
    let taken = durable::catalog_on_disk(&served.folder.0.join("shard-0")).sessions;
    assert_eq!(taken.len(), 1);
    std::fs::remove_dir_all(&served.folder.0).unwrap();
    served.start_after("", &LONG);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut stranger = Shard::over_without_hello(&served.address()).await;
        for client in taken {
            let taking = pb::HelloRequest { secret: Bytes::from_static(&OTHER), ..hello(client) };
            stranger.control.hello(Request::new(taking)).await.unwrap();
        }
    });
    proxies.set_down(false);
    assert_eq!(register().unwrap_err().kind, Kind::Fenced);
    let error = client.push(&[gradient("w", vec![-1.0; 3])], &durable::options(PATIENT)).unwrap_err();
    assert!(matches!(&error, PushError::Refused(error) if error.kind == Kind::Fenced), "{error:?}");
}
