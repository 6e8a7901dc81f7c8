//! Portions of samples through the generated client.

use crate::peer::{call_as, connect_marked, message};
use crate::stubs::{CLIENT, Shard, config, error, signed, start, start_with, timed, within};
use fastps_core::error::{Error, Kind};
use fastps_proto::v1 as pb;
use fastps_server::ServerConfig;
use std::time::Duration;

/// A request for the only portion.
fn question(client: u64, wait_ms: u32) -> pb::PortionRequest {
    pb::PortionRequest {
        client,
        name: "train".into(),
        n: 1,
        size: 1,
        worker: 1,
        wait_ms,
        ..pb::PortionRequest::default()
    }
}

async fn ask(shard: &Shard, question: pb::PortionRequest) -> Result<pb::PortionResponse, Error> {
    let mut control = shard.control.clone();
    within(control.portion(timed(question))).await.map(tonic::Response::into_inner).map_err(error)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_answer_waits_until_the_epoch_is_over_or_its_time_is_up() {
    let (server, first, _stream) = start().await;
    let second = Shard::connect(&server.addresses()[0], CLIENT + 1).await;
    let taken = ask(&first, question(CLIENT, 0)).await.unwrap();
    assert_eq!((taken.portion, taken.over, taken.epoch, taken.unfinished), (Some(0), false, 0, 1));
    let nothing = ask(&second, question(CLIENT + 1, 10)).await.unwrap();
    assert_eq!(nothing, pb::PortionResponse { portion: None, ..taken });

    let waits = tokio::spawn(async move { ask(&second, question(CLIENT + 1, 60_000)).await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!waits.is_finished());
    let then = pb::PortionThen::Rest.into();
    let finished = pb::PortionRequest { run: taken.run, finished: Some(0), then, ..question(CLIENT, 0) };
    ask(&first, finished).await.unwrap();
    let over = within(waits).await.unwrap().unwrap();
    assert_eq!((over.portion, over.over, over.epoch, over.run), (None, true, 1, taken.run));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_call_that_was_given_up_is_given_nothing() {
    let (server, first, _stream) = start().await;
    let second = Shard::connect(&server.addresses()[0], CLIENT + 1).await;
    ask(&first, question(CLIENT, 0)).await.unwrap();
    // On the connection of the first one, so that the server reads its end before the next request.
    let given_up = ask(&first, question(CLIENT + 1, 60_000));
    assert!(tokio::time::timeout(Duration::from_millis(100), given_up).await.is_err());
    let then = pb::PortionThen::Leave.into();
    ask(&first, pb::PortionRequest { client: CLIENT, then, ..Default::default() }).await.unwrap();
    let taken = ask(&second, pb::PortionRequest { worker: 2, ..question(CLIENT + 1, 0) }).await.unwrap();
    assert_eq!(taken.portion, Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_server_that_stops_lets_nobody_wait() {
    let (server, first, _stream) = start().await;
    let second = Shard::connect(&server.addresses()[0], CLIENT + 1).await;
    ask(&first, question(CLIENT, 0)).await.unwrap();
    let waits = tokio::spawn(async move { ask(&second, question(CLIENT + 1, 60_000)).await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    let stopped = tokio::task::spawn_blocking(move || server.stop(Duration::from_secs(20)));
    let nothing = within(waits).await.unwrap().unwrap();
    assert_eq!((nothing.portion, nothing.over), (None, false));
    within(stopped).await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_call_ends_at_its_deadline_with_a_refusal() {
    let (server, first, _stream) = start().await;
    let _second = Shard::connect(&server.addresses()[0], CLIENT + 1).await;
    ask(&first, question(CLIENT, 0)).await.unwrap();
    // Through plain h2: a generated client would end the call before the server does.
    let mut requests = connect_marked(&server.addresses()[0], 1 << 20, 16 << 10).await;
    let mut headers = signed(()).into_parts().0.into_headers();
    headers.insert("grpc-timeout", "100m".parse().unwrap());
    headers.insert("te", "trailers".parse().unwrap());
    let (answer, mut body) = call_as(&mut requests, "/fastps.v1.Control/Portion", headers);
    body.send_data(message(&question(CLIENT + 1, 60_000)), true).unwrap();
    let answer = within(answer).await.unwrap();
    let status = tonic::Status::from_header_map(answer.headers()).unwrap();
    assert_eq!(status.code(), tonic::Code::DeadlineExceeded, "{status}");
    let refused = error(status);
    assert_eq!((refused.kind, refused.shard), (Kind::Deadline, Some(0)), "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn questions_that_make_no_sense_are_refused() {
    let (server, first, _stream) = start_with(&ServerConfig { shards: 2, ..config() }).await;
    let other = Shard::connect(&server.addresses()[1], CLIENT).await;
    let refused = ask(&other, question(CLIENT, 0)).await.unwrap_err();
    assert_eq!((refused.kind, refused.shard), (Kind::Precondition, Some(1)));
    for (kind, wrong) in [
        (Kind::Lease, question(CLIENT + 1, 0)),
        (Kind::Config, pb::PortionRequest { worker: 0, ..question(CLIENT, 0) }),
        (Kind::Config, pb::PortionRequest { name: String::new(), ..question(CLIENT, 0) }),
        (Kind::Config, pb::PortionRequest { n: 0, ..question(CLIENT, 0) }),
        (Kind::Frame, pb::PortionRequest { then: 9, ..question(CLIENT, 0) }),
    ] {
        let refused = ask(&first, wrong).await.unwrap_err();
        assert_eq!((refused.kind, refused.shard), (kind, Some(0)), "{refused}");
    }
}
