//! A configuration file (TOML): its keys are the names of options, without the dashes, and clap checks their
//! values as it checks those of the command line.

use clap::{Arg, ArgAction, ArgMatches, Command, parser::ValueSource};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::text;
use std::any::TypeId;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use toml::de::{DeTable, DeValue};

/// Options that a file cannot have.
const NOT_IN_A_FILE: [&str; 3] = ["config", "help", "version"];

/// A setting of the file, as the options that have its effect.
#[derive(Debug)]
pub(super) struct Setting {
    pub(super) key: String,
    pub(super) line: usize,
    /// None for a flag that is off.
    option: Option<String>,
}

/// The settings of a file.
#[derive(Debug)]
pub(super) struct ConfigFile {
    pub(super) path: PathBuf,
    pub(super) settings: Vec<Setting>,
}

impl ConfigFile {
    /// Reads and checks a file; `command` has the options.
    pub(super) fn read(path: &Path, command: &Command) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|error| {
            Error::new(Kind::Config, format!("cannot read the configuration {}: {error}", path.display()))
        })?;
        let place = |at: usize| format!("{}:{}", path.display(), line_of(&text, at));
        let table = DeTable::parse(&text).map_err(|error| {
            let at = error.span().map_or_else(|| path.display().to_string(), |span| place(span.start));
            Error::new(Kind::Config, format!("{at}: {}", error.message()))
        })?;
        let mut settings = Vec::new();
        for (key, value) in table.get_ref() {
            let line = line_of(&text, key.span().start);
            let option = setting(key.get_ref(), value.get_ref(), command).map_err(|mut error| {
                error.message = format!("{}: {}", place(key.span().start), error.message);
                error
            })?;
            settings.push(Setting { key: key.get_ref().to_string(), line, option });
        }
        settings.sort_by_key(|setting| setting.line);
        Ok(Self { path: path.to_owned(), settings })
    }

    /// The options for a command line that has those of `given`: the command line and the environment come
    /// first.
    pub(super) fn options(&self, given: &ArgMatches) -> impl Iterator<Item = OsString> {
        let is_given = |setting: &&Setting| {
            let source = given.value_source(&id(&setting.key));
            !matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable))
        };
        let open = self.settings.iter().filter(is_given);
        open.filter_map(|setting| setting.option.clone()).map(OsString::from)
    }
}

/// The name by which clap knows an option.
pub(super) fn id(key: &str) -> String {
    key.replace('-', "_")
}

fn line_of(text: &str, at: usize) -> usize {
    1 + text[..text.floor_char_boundary(at)].matches('\n').count()
}

/// The option of a key with a value.
fn setting(key: &str, value: &DeValue<'_>, command: &Command) -> Result<Option<String>> {
    let named = |arg: &&Arg| arg.get_long() == Some(key) && !NOT_IN_A_FILE.contains(&key);
    let Some(arg) = command.get_arguments().find(named) else {
        return Err(unknown(key, command));
    };
    let wrong = |expected: &str| {
        let got = format!("{} {}", article(value), shown(value));
        Error::new(Kind::Config, format!("{key} has the wrong type")).expected(expected, got.trim())
    };
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        let is_on = value.as_bool().ok_or_else(|| wrong("true or false"))?;
        return Ok(is_on.then(|| format!("--{key}")));
    }
    let text = if is_whole(arg) {
        value.as_integer().map(ToString::to_string).ok_or_else(|| wrong("a whole number"))?
    } else if let (Some(delimiter), Some(items)) = (arg.get_value_delimiter(), value.as_array()) {
        let items = items.iter().map(|item| item.get_ref().as_str()).collect::<Option<Vec<_>>>();
        items.ok_or_else(|| wrong("a list of strings"))?.join(&delimiter.to_string())
    } else {
        match value {
            DeValue::String(text) => text.to_string(),
            DeValue::Integer(number) if !is_text(arg) => number.to_string(),
            DeValue::Float(number) if !is_text(arg) => number.to_string(),
            _ if arg.get_value_delimiter().is_some() => return Err(wrong("a string or a list of strings")),
            _ => return Err(wrong("a string")),
        }
    };
    let option = format!("--{key}={text}");
    let refused = |error: clap::Error| {
        let text = error.to_string();
        let reason = text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned();
        Error::new(Kind::Config, reason)
    };
    // The other options of a file may come from elsewhere, so that only this one is checked.
    command.clone().try_get_matches_from([command.get_name(), &option]).map_err(refused)?;
    Ok(Some(option))
}

fn unknown(key: &str, command: &Command) -> Error {
    let known: Vec<_> = command.get_arguments().filter_map(Arg::get_long).collect();
    let known: Vec<_> = known.into_iter().filter(|name| !NOT_IN_A_FILE.contains(name)).collect();
    let expected = match text::nearest(key, known.iter().copied()) {
        Some(near) => format!("an option of fastps serve, such as {near:?}"),
        None => "an option of fastps serve (fastps serve --help lists them)".to_owned(),
    };
    Error::new(Kind::Config, "there is no such key").expected(expected, format_args!("{key:?}"))
}

fn has_type<T: 'static>(arg: &Arg) -> bool {
    arg.get_value_parser().type_id() == TypeId::of::<T>()
}

/// Returns whether an option is a whole number. A size may have a unit.
fn is_whole(arg: &Arg) -> bool {
    let is_size = arg.get_id() == "memory_limit";
    has_type::<u32>(arg) || has_type::<usize>(arg) || has_type::<u64>(arg) && !is_size
}

pub(super) fn is_text(arg: &Arg) -> bool {
    has_type::<String>(arg) || has_type::<PathBuf>(arg)
}

fn article(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "the string",
        DeValue::Integer(_) | DeValue::Float(_) => "the number",
        DeValue::Boolean(_) => "the boolean",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

fn shown(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) => format!("{text:?}"),
        DeValue::Integer(number) => number.to_string(),
        DeValue::Float(number) => number.to_string(),
        DeValue::Boolean(is_on) => is_on.to_string(),
        _ => String::new(),
    }
}
