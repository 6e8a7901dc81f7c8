//! A run with all actions on it, so that any earlier moment can be reached by replay.

use crate::run::Run;
use crate::settings::Settings;
use fastps_core::error::{Error, Kind, Result};

/// Most actions on one run.
const MOST_ACTIONS: usize = 1 << 12;
/// Index of the learning rate, the optimizer's first setting.
const LR: usize = 29;
/// Settings besides the rate that may change while the workers continue.
const AT_ONCE: [&str; 6] = ["mean", "spread", "straggler", "delay", "evaluate_every", "lease"];

/// An action on a run.
#[derive(Clone, Debug)]
pub(crate) enum Action {
    /// Kills a worker.
    Kill(usize),
    /// Pauses a worker for some virtual seconds.
    Pause(usize, f64),
    /// Lets another worker join.
    Join,
    /// Makes a worker's next gradient NaN.
    Break(usize),
    /// Continues with other settings.
    Set(Box<Settings>),
}

impl Action {
    /// Reads an action from a caller's numbers.
    pub(crate) fn of(what: u32, worker: u32, seconds: f64) -> Result<Self> {
        let worker = worker as usize;
        match what {
            0 => Ok(Self::Kill(worker)),
            1 if seconds > 0.0 && seconds.is_finite() => Ok(Self::Pause(worker, seconds)),
            1 => Err(Error::new(Kind::Config, "invalid seconds").expected("a finite number > 0", seconds)),
            2 => Ok(Self::Join),
            3 => Ok(Self::Break(worker)),
            _ => Err(Error::new(Kind::Config, "invalid action").expected("0 to 3", what)),
        }
    }
}

/// An action and its moment: events handled before, and the time.
#[derive(Clone, Debug)]
struct Done {
    handled: u64,
    time: f64,
    action: Action,
}

/// A run that can go back.
#[derive(Debug)]
pub(crate) struct Simulation {
    first: Settings,
    done: Vec<Done>,
    /// The present moment; `None` only while it is being replaced.
    run: Option<Run>,
}

impl Simulation {
    pub(crate) fn new(settings: Settings) -> Result<Self> {
        let run = Some(Run::new(settings.clone())?);
        Ok(Self { first: settings, done: Vec::new(), run })
    }

    /// The present moment.
    pub(crate) fn run(&mut self) -> Result<&mut Run> {
        self.run.as_mut().ok_or_else(|| Error::new(Kind::Internal, "the simulation has failed"))
    }

    /// Performs an action now; true if that restarted the workers.
    pub(crate) fn act(&mut self, action: Action) -> Result<bool> {
        if self.done.len() >= MOST_ACTIONS {
            return Err(Error::new(
                Kind::Capacity,
                "too much was done to this simulation; begin another one",
            )
            .expected(format!("at most {MOST_ACTIONS} actions"), "one more"));
        }
        let run = self.run()?;
        let done = Done { handled: run.log.handled, time: run.now, action: action.clone() };
        let restarted = self.apply(action)?;
        self.done.push(done);
        Ok(restarted)
    }

    fn apply(&mut self, action: Action) -> Result<bool> {
        let run = self.run()?;
        match action {
            Action::Kill(worker) => run.kill(worker),
            Action::Pause(worker, seconds) => run.pause(worker, seconds),
            Action::Join => run.join()?,
            Action::Break(worker) => run.break_next(worker),
            Action::Set(settings) => return self.set(*settings),
        }
        Ok(false)
    }

    fn set(&mut self, settings: Settings) -> Result<bool> {
        let run = self.run()?;
        if run.settings.continues_as(&settings, &AT_ONCE, LR) {
            let lr = settings.optimizer.lr();
            if lr != run.settings.optimizer.lr() {
                run.set_lr(lr);
            }
            run.settings = settings;
            return Ok(false);
        }
        if let Some(run) = self.run.take() {
            self.run = Some(run.restarted(settings)?);
        }
        Ok(true)
    }

    /// Seeks by replay; returns the number of events.
    pub(crate) fn rewind(&mut self, time: f64) -> Result<u32> {
        let done = std::mem::take(&mut self.done);
        self.run = Some(Run::new(self.first.clone())?);
        let mut handled = 0;
        for one in done.into_iter().take_while(|one| one.time <= time) {
            let run = self.run()?;
            let events = one.handled.saturating_sub(run.log.handled);
            handled += run.advance(f64::INFINITY, f64::INFINITY, events as u32);
            run.now = one.time;
            self.apply(one.action.clone())?;
            self.done.push(one);
        }
        Ok(handled + self.run()?.advance(time, f64::INFINITY, u32::MAX))
    }
}
