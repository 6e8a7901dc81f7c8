//! Questions for portions of samples, and their answers.

use super::fields::unknown;
use fastps_core::error::{Error, Kind, Result};
use fastps_core::portions::{Ask, Given, PortionAnswer, Samples, Then};
use fastps_proto::v1 as pb;
use std::time::Duration;

/// Reads what a worker or a replica is to do next.
pub(super) fn then_from_wire(then: i32) -> Result<Then> {
    match pb::PortionThen::try_from(then) {
        Ok(pb::PortionThen::Unspecified | pb::PortionThen::Take) => Ok(Then::Take),
        Ok(pb::PortionThen::Rest) => Ok(Then::Rest),
        Ok(pb::PortionThen::Leave) => Ok(Then::Leave),
        Err(_) => Err(unknown("then", "1 to 3", then)),
    }
}

pub(super) fn then_to_wire(then: Then) -> pb::PortionThen {
    match then {
        Then::Take => pb::PortionThen::Take,
        Then::Rest => pb::PortionThen::Rest,
        Then::Leave => pb::PortionThen::Leave,
    }
}

/// Reads a question.
pub fn ask_from_wire(request: pb::PortionRequest) -> Result<Ask> {
    if request.worker == 0 {
        return Err(Error::new(Kind::Config, "a worker's number is not 0"));
    }
    let then = then_from_wire(request.then)?;
    let pb::PortionRequest { name, n, size, seed, worker, run, epoch, finished, .. } = request;
    Ok(Ask { samples: Samples { name: name.into(), n, size, seed }, worker, run, epoch, finished, then })
}

/// A question in wire form.
pub fn ask_to_wire(ask: &Ask, client: u64, wait: Duration) -> pb::PortionRequest {
    let then = then_to_wire(ask.then);
    let Samples { name, n, size, seed } = &ask.samples;
    pb::PortionRequest {
        client,
        name: name.to_string(),
        n: *n,
        size: *size,
        seed: *seed,
        worker: ask.worker,
        run: ask.run,
        epoch: ask.epoch,
        finished: ask.finished,
        then: then.into(),
        wait_ms: u32::try_from(wait.as_millis()).unwrap_or(u32::MAX),
    }
}

/// An answer in wire form.
pub fn given_to_wire(answer: PortionAnswer) -> pb::PortionResponse {
    let PortionAnswer { run, epoch, unfinished, given } = answer;
    let (portion, over) = match given {
        Given::Portion(portion) => (Some(portion), false),
        Given::Over => (None, true),
        Given::Nothing => (None, false),
    };
    pb::PortionResponse { run, epoch, unfinished, portion, over }
}

/// Reads an answer.
pub fn given_from_wire(answer: pb::PortionResponse) -> PortionAnswer {
    let pb::PortionResponse { run, epoch, unfinished, portion, over } = answer;
    let given = match portion {
        Some(portion) => Given::Portion(portion),
        None if over => Given::Over,
        None => Given::Nothing,
    };
    PortionAnswer { run, epoch, unfinished, given }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_and_answers_survive_both_ways() {
        let samples = Samples { name: "träin".into(), n: 10, size: 3, seed: u64::MAX };
        for (then, finished) in [(Then::Take, Some(0)), (Then::Rest, None), (Then::Leave, Some(3))] {
            let ask = Ask { samples: samples.clone(), worker: 5, run: 6, epoch: 7, finished, then };
            let wire = ask_to_wire(&ask, 4, Duration::from_millis(1500));
            assert_eq!((wire.client, wire.wait_ms), (4, 1500));
            assert_eq!(ask_from_wire(wire).unwrap(), ask);
        }
        for given in [Given::Portion(0), Given::Over, Given::Nothing] {
            let answer = PortionAnswer { run: 1, epoch: 2, unfinished: 3, given };
            assert_eq!(given_from_wire(given_to_wire(answer)), answer);
        }
    }

    #[test]
    fn bad_questions_are_refused() {
        let good = pb::PortionRequest { worker: 1, ..Default::default() };
        assert_eq!(ask_from_wire(good.clone()).unwrap().then, Then::Take);
        let nobody = pb::PortionRequest { worker: 0, ..good.clone() };
        assert_eq!(ask_from_wire(nobody).unwrap_err().kind, Kind::Config);
        let later = pb::PortionRequest { then: 4, ..good };
        assert_eq!(ask_from_wire(later).unwrap_err().kind, Kind::Frame);
    }
}
