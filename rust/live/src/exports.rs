//! The C ABI. A caller writes into the input buffer and reads the output buffer, so no function takes an
//! address, and everything here is safe Rust except the names that the linker keeps.
//!
//! SAFETY of the attributes: a name is kept in WebAssembly only, where the module has no imports and no C
//! library. In a native program `read` would replace the one of the C library.
#![allow(unsafe_code)]

use crate::describe::{ABI, describe as description};
use crate::durations::duration;
use crate::fit::Repeated;
use crate::problems::{Problem, TOYS, Toy};
use crate::read::read as state_of;
use crate::settings::Settings;
use crate::simulation::{Action, Simulation};
use fastps_core::error::{Error, Kind, Result};
use std::cell::RefCell;

/// Most bytes of the input.
const LONGEST_INPUT: u32 = 1 << 16;
/// Most points of a grid.
const MOST_POINTS: u32 = 1 << 20;

/// Most simulations and fits at once.
const MOST_HANDLES: usize = 64;
/// Most durations of one call.
const MOST_DURATIONS: u32 = 1 << 16;

/// Object behind a handle.
enum Kept {
    Simulation(Box<Simulation>),
    Fit(Box<Repeated>),
}

/// State between two calls. The buffers are of float64, so that their addresses are multiples of 8.
#[derive(Default)]
struct State {
    input: Vec<f64>,
    output: Vec<f64>,
    /// Bytes of the output.
    length: usize,
    kept: Vec<Option<Kept>>,
}

thread_local! {
    static STATE: RefCell<State> = RefCell::default();
}

impl State {
    fn text(&mut self, text: &str) {
        self.output.clear();
        self.output.resize(text.len().div_ceil(8), 0.0);
        bytemuck::cast_slice_mut(&mut self.output)[..text.len()].copy_from_slice(text.as_bytes());
        self.length = text.len();
    }

    fn numbers(&mut self, fill: impl FnOnce(&mut Vec<f64>)) {
        self.output.clear();
        fill(&mut self.output);
        self.length = 8 * self.output.len();
    }

    fn settings(&self) -> Result<Settings> {
        Settings::read(&self.input)
    }

    /// Keeps an object and returns its handle.
    fn keep(&mut self, what: Kept) -> Result<u32> {
        let place = self.kept.iter().position(Option::is_none).unwrap_or(self.kept.len());
        if place >= MOST_HANDLES {
            return Err(Error::new(Kind::Capacity, "too many simulations and fits exist; free some")
                .expected(format!("at most {MOST_HANDLES}"), "one more"));
        }
        if place == self.kept.len() {
            self.kept.push(None);
        }
        self.kept[place] = Some(what);
        Ok(place as u32)
    }

    fn free(&mut self, handle: u32) {
        if let Some(place) = self.kept.get_mut(handle as usize) {
            *place = None;
        }
    }

    /// A simulation, borrowed together with the buffers.
    fn simulation(&mut self, handle: u32) -> Result<&mut Simulation> {
        match self.kept.get_mut(handle as usize) {
            Some(Some(Kept::Simulation(simulation))) => Ok(simulation),
            _ => Err(no_handle("simulation", handle)),
        }
    }

    fn fit(&mut self, handle: u32) -> Result<&mut Repeated> {
        match self.kept.get_mut(handle as usize) {
            Some(Some(Kept::Fit(fit))) => Ok(fit),
            _ => Err(no_handle("fit", handle)),
        }
    }
}

fn no_handle(what: &str, handle: u32) -> Error {
    Error::new(Kind::Config, format!("there is no such {what}"))
        .expected("a handle that was returned", handle)
}

/// Runs a call; an error becomes the output.
fn answer(call: impl FnOnce(&mut State) -> Result<u32>) -> i32 {
    STATE.with_borrow_mut(|state| {
        state.length = 0;
        match call(state) {
            Ok(result) => result as i32,
            Err(error) => {
                state.text(&error.to_string());
                -1
            }
        }
    })
}

/// The version of the calls.
#[cfg_attr(target_arch = "wasm32", unsafe(no_mangle))]
pub extern "C" fn abi() -> i32 {
    ABI
}

/// Makes the input buffer and returns its address; null if it would be too long.
#[cfg_attr(target_arch = "wasm32", unsafe(no_mangle))]
pub extern "C" fn input(bytes: u32) -> *mut f64 {
    if bytes > LONGEST_INPUT {
        return std::ptr::null_mut();
    }
    STATE.with_borrow_mut(|state| {
        state.input.clear();
        state.input.resize(bytes.div_ceil(8) as usize, 0.0);
        state.input.as_mut_ptr()
    })
}

/// The address of the last call's output.
#[cfg_attr(target_arch = "wasm32", unsafe(no_mangle))]
pub extern "C" fn output() -> *const f64 {
    STATE.with_borrow(|state| state.output.as_ptr())
}

/// The bytes of the last call's output.
#[cfg_attr(target_arch = "wasm32", unsafe(no_mangle))]
pub extern "C" fn output_len() -> u32 {
    STATE.with_borrow(|state| state.length as u32)
}

/// Writes names, numbers and defaults of all settings.
#[cfg_attr(target_arch = "wasm32", unsafe(no_mangle))]
pub extern "C" fn describe() -> i32 {
    answer(|state| {
        state.text(&description());
        Ok(0)
    })
}

/// The toy with a number.
fn toy(problem: u32) -> Result<&'static Toy> {
    match Problem::of(problem as usize) {
        Problem::Toy(toy) => Ok(toy),
        Problem::Digits => Err(Error::new(Kind::Config, "the problem is no function of two variables")
            .expected(format!("a number below {}", TOYS.len()), problem)),
    }
}

/// The values of a problem on a grid.
#[cfg_attr(target_arch = "wasm32", unsafe(no_mangle))]
pub extern "C" fn contours(problem: u32, x0: f64, x1: f64, columns: u32, y0: f64, y1: f64, rows: u32) -> i32 {
    answer(|state| {
        let (toy, points) = (toy(problem)?, columns.checked_mul(rows));
        let points = points.filter(|points| (1..=MOST_POINTS).contains(points)).ok_or_else(|| {
            Error::new(Kind::Config, "invalid grid")
                .expected(format!("1 to {MOST_POINTS} points"), format!("{columns} x {rows}"))
        })?;
        let at = |from: f64, to: f64, k: u32, n: u32| {
            from + (to - from) * (f64::from(k) / f64::from((n - 1).max(1)))
        };
        state.numbers(|output| {
            output.extend((0..rows).flat_map(|row| {
                let y = at(y0, y1, row, rows);
                (0..columns).map(move |column| (toy.at)(at(x0, x1, column, columns), y).0)
            }));
        });
        Ok(points)
    })
}

/// A problem's value and gradient at a point, without noise.
#[cfg_attr(target_arch = "wasm32", unsafe(no_mangle))]
pub extern "C" fn gradient(problem: u32, x: f64, y: f64) -> i32 {
    answer(|state| {
        let (f, [dx, dy]) = (toy(problem)?.at)(x, y);
        state.numbers(|output| output.extend([f, dx, dy]));
        Ok(0)
    })
}

/// Makes a simulation from the settings in the input.
#[cfg_attr(target_arch = "wasm32", unsafe(no_mangle))]
pub extern "C" fn make() -> i32 {
    answer(|state| {
        let simulation = Simulation::new(state.settings()?)?;
        state.keep(Kept::Simulation(Box::new(simulation)))
    })
}

/// Frees a simulation.
#[cfg_attr(target_arch = "wasm32", unsafe(no_mangle))]
pub extern "C" fn destroy(run: u32) -> i32 {
    answer(|state| {
        state.simulation(run)?;
        state.free(run);
        Ok(0)
    })
}

/// Continues with the settings in the input; 1 if the workers were restarted.
#[cfg_attr(target_arch = "wasm32", unsafe(no_mangle))]
pub extern "C" fn set(run: u32) -> i32 {
    answer(|state| {
        let settings = state.settings()?;
        state.simulation(run)?.act(Action::Set(Box::new(settings))).map(u32::from)
    })
}

/// Handles events until a time, a number of updates or a number of events is reached.
#[cfg_attr(target_arch = "wasm32", unsafe(no_mangle))]
pub extern "C" fn advance(run: u32, time: f64, updates: f64, events: u32) -> i32 {
    answer(|state| Ok(state.simulation(run)?.run()?.advance(time, updates, events.min(i32::MAX as u32))))
}

/// The state of a simulation and of its workers.
#[cfg_attr(target_arch = "wasm32", unsafe(no_mangle))]
pub extern "C" fn read(run: u32) -> i32 {
    answer(|state| {
        let (mut output, run) = (Vec::new(), state.simulation(run)?.run()?);
        let workers = state_of(run, &mut output);
        state.numbers(|place| *place = output);
        Ok(workers)
    })
}

/// Finished steps from a number on.
#[cfg_attr(target_arch = "wasm32", unsafe(no_mangle))]
pub extern "C" fn steps(run: u32, from: f64) -> i32 {
    answer(|state| {
        let run = state.simulation(run)?.run()?;
        let rows: Vec<_> = run.log.rows.since(from).flat_map(|(_, row)| *row).collect();
        let count = rows.len() / crate::log::ROW;
        state.numbers(|output| *output = rows);
        Ok(count as u32)
    })
}

/// The loss at the server's values over the run.
#[cfg_attr(target_arch = "wasm32", unsafe(no_mangle))]
pub extern "C" fn curve(run: u32) -> i32 {
    answer(|state| {
        let points = state.simulation(run)?.run()?.log.curve.clone();
        state.numbers(|output| output.extend(points.iter().flatten()));
        Ok(points.len() as u32)
    })
}

/// The histogram of the staleness.
#[cfg_attr(target_arch = "wasm32", unsafe(no_mangle))]
pub extern "C" fn staleness(run: u32) -> i32 {
    answer(|state| {
        let counts = state.simulation(run)?.run()?.log.staleness;
        state.numbers(|output| output.extend(counts.map(|count| count as f64)));
        Ok(counts.len() as u32)
    })
}

/// Pushes and their bytes, by codec.
#[cfg_attr(target_arch = "wasm32", unsafe(no_mangle))]
pub extern "C" fn bytes(run: u32) -> i32 {
    answer(|state| {
        let codecs = state.simulation(run)?.run()?.log.codecs;
        state.numbers(|output| output.extend(codecs.as_flattened().iter().map(|count| *count as f64)));
        Ok(codecs.len() as u32)
    })
}

/// Messages from a number on.
#[cfg_attr(target_arch = "wasm32", unsafe(no_mangle))]
pub extern "C" fn messages(run: u32, from: f64) -> i32 {
    answer(|state| {
        let (mut lines, mut count) = (String::new(), 0);
        for (number, message) in state.simulation(run)?.run()?.log.messages.since(from) {
            let worker = message.worker.map_or(-1, |worker| worker as i64);
            let (time, kind, text) = (message.time, message.kind, &message.text);
            lines.extend([&*format!("{number}\t{time}\t{kind}\t{worker}\t"), text, "\n"]);
            count += 1;
        }
        state.text(&lines);
        Ok(count)
    })
}

/// Kills (0) or pauses (1) a worker, lets one join (2), or makes its next gradient NaN (3).
#[cfg_attr(target_arch = "wasm32", unsafe(no_mangle))]
pub extern "C" fn act(run: u32, what: u32, worker: u32, seconds: f64) -> i32 {
    answer(|state| {
        let action = Action::of(what, worker, seconds)?;
        state.simulation(run)?.act(action).map(|_| 0)
    })
}

/// Seeks by replay.
#[cfg_attr(target_arch = "wasm32", unsafe(no_mangle))]
pub extern "C" fn rewind(run: u32, time: f64) -> i32 {
    answer(|state| {
        if !time.is_finite() {
            return Err(Error::new(Kind::Config, "invalid time").expected("a finite number", time));
        }
        state.simulation(run)?.rewind(time).map(|events| events.min(i32::MAX as u32))
    })
}

/// Loss and test error at the server's values now.
#[cfg_attr(target_arch = "wasm32", unsafe(no_mangle))]
pub extern "C" fn evaluate(run: u32) -> i32 {
    answer(|state| {
        let found = state.simulation(run)?.run()?.evaluate();
        state.numbers(|output| output.extend(found));
        Ok(0)
    })
}

/// The server's values.
#[cfg_attr(target_arch = "wasm32", unsafe(no_mangle))]
pub extern "C" fn values(run: u32) -> i32 {
    answer(|state| {
        let values: Vec<_> = state.simulation(run)?.run()?.values().iter().copied().map(f64::from).collect();
        let count = values.len();
        state.numbers(|output| *output = values);
        Ok(count as u32)
    })
}

/// Virtual seconds of some of a worker's steps.
#[cfg_attr(target_arch = "wasm32", unsafe(no_mangle))]
pub extern "C" fn durations(run: u32, worker: u32, first: u32, count: u32) -> i32 {
    answer(|state| {
        if first == 0 || count > MOST_DURATIONS {
            return Err(Error::new(Kind::Config, "invalid steps").expected(
                format!("at most {MOST_DURATIONS} steps from 1 on"),
                format!("{count} from {first} on"),
            ));
        }
        let settings = state.simulation(run)?.run()?.settings.clone();
        let of = |k| duration(&settings, worker as usize, u64::from(first) + u64::from(k));
        state.numbers(|output| output.extend((0..count).map(of)));
        Ok(count)
    })
}

/// Prepares repeated runs of the settings in the input.
#[cfg_attr(target_arch = "wasm32", unsafe(no_mangle))]
pub extern "C" fn fit_make() -> i32 {
    answer(|state| {
        let fit = Repeated::new(state.settings()?)?;
        state.keep(Kept::Fit(Box::new(fit)))
    })
}

/// Repeats more runs.
#[cfg_attr(target_arch = "wasm32", unsafe(no_mangle))]
pub extern "C" fn fit_run(fit: u32, runs: u32) -> i32 {
    answer(|state| state.fit(fit)?.run(runs).map(|runs| runs as u32))
}

/// The momentum of the mean path.
#[cfg_attr(target_arch = "wasm32", unsafe(no_mangle))]
pub extern "C" fn fit_read(fit: u32) -> i32 {
    answer(|state| {
        let mut found = Vec::new();
        let length = state.fit(fit)?.read(&mut found);
        state.numbers(|output| *output = found);
        Ok(length)
    })
}

/// Frees repeated runs.
#[cfg_attr(target_arch = "wasm32", unsafe(no_mangle))]
pub extern "C" fn fit_destroy(fit: u32) -> i32 {
    answer(|state| {
        state.fit(fit)?;
        state.free(fit);
        Ok(0)
    })
}
