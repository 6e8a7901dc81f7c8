//! All settings with their origins, in the form of a configuration file.

use super::Settings;
use super::file::{ConfigFile, id};
use crate::ServeArgs;
use clap::{Arg, ArgAction, CommandFactory, parser::ValueSource};

/// Every option with its value.
pub(super) fn values(settings: &Settings) -> Vec<String> {
    lines(settings).into_iter().map(|(text, _)| text.trim_start_matches("# ").to_owned()).collect()
}

/// One line for each option.
pub(super) fn text(settings: &Settings) -> String {
    let lines = lines(settings);
    let widest = lines.iter().filter(|(_, origin)| origin.is_some()).map(|(text, _)| text.len()).max();
    let shown = lines.into_iter().map(|(text, origin)| match origin {
        Some(origin) => format!("{text:width$}  # {origin}\n", width = widest.unwrap_or(0).min(50)),
        None => format!("{text}\n"),
    });
    shown.collect()
}

fn lines(settings: &Settings) -> Vec<(String, Option<String>)> {
    let command = ServeArgs::command();
    let options = command
        .get_arguments()
        .filter(|arg| arg.get_long().is_some_and(|name| !["config", "help", "version"].contains(&name)));
    options.map(|arg| line(arg, settings)).collect()
}

/// The setting, and where it comes from.
fn line(arg: &Arg, settings: &Settings) -> (String, Option<String>) {
    let name = arg.get_long().unwrap_or_default();
    let raw = settings.all.get_raw(arg.get_id().as_str());
    let values: Vec<String> =
        raw.into_iter().flatten().map(|value| value.to_string_lossy().into_owned()).collect();
    if values.is_empty() {
        return (format!("# {name} is not set"), None);
    }
    let value = if arg.get_value_delimiter().is_some() {
        format!("[{}]", values.iter().map(|value| quoted(value)).collect::<Vec<_>>().join(", "))
    } else {
        values.iter().map(|value| scalar(arg, value)).collect()
    };
    (format!("{name} = {value}"), Some(origin(arg, name, settings)))
}

fn quoted(value: &str) -> String {
    serde_json::Value::from(value).to_string()
}

/// A value in TOML: a flag or a number as it is, where the option is no text.
fn scalar(arg: &Arg, value: &str) -> String {
    let is_text = super::file::is_text(arg);
    if matches!(arg.get_action(), ArgAction::SetTrue) || !is_text && value.parse::<f64>().is_ok() {
        return value.to_owned();
    }
    quoted(value)
}

fn origin(arg: &Arg, name: &str, settings: &Settings) -> String {
    match settings.given.value_source(arg.get_id().as_str()) {
        Some(ValueSource::CommandLine) => format!("--{name}"),
        Some(ValueSource::EnvVariable) => {
            arg.get_env().map_or_else(String::new, |variable| variable.to_string_lossy().into_owned())
        }
        _ => settings.file.as_ref().and_then(|file| place(file, arg)).unwrap_or_else(|| "default".to_owned()),
    }
}

fn place(file: &ConfigFile, arg: &Arg) -> Option<String> {
    let setting = file.settings.iter().find(|setting| *arg.get_id() == id(&setting.key))?;
    Some(format!("{}:{}", file.path.display(), setting.line))
}
