//! Setting the log up.

use std::fs::File;
use std::path::Path;
use std::sync::Mutex;

use anyhow::Context;
use headwater_api::{Problem, ProblemKind};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::cli::LogFormat;

const ADVICE: &str =
    "write off, error, warn, info, debug or trace, or parts like headwater_service=debug with commas between";

/// Logs to standard error.
pub fn to_stderr(filter: &str, format: LogFormat) -> anyhow::Result<()> {
    let filter = parse(filter)?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => builder.with_ansi(false).init(),
        LogFormat::Json => builder.json().init(),
    }
    Ok(())
}

/// A filter of which every part counts. `EnvFilter` takes a misspelt level for a target, and the log is silent.
fn parse(text: &str) -> anyhow::Result<EnvFilter> {
    let refused = |why: String| {
        let problem = Problem::new(ProblemKind::Invalid, format!("'{text}' is not a log filter: {why}"));
        problem.advise(ADVICE)
    };
    for part in text.split(',').filter(|_| !text.is_empty()) {
        // Without one, a span has all levels.
        if part.ends_with(']') {
            continue;
        }
        let level = part.rsplit_once('=').map_or(part, |(_, level)| level);
        if part.is_empty() {
            return Err(refused("a part of it is empty".to_owned()).into());
        }
        if level.is_empty() || level.parse::<LevelFilter>().is_err() {
            return Err(refused(format!("'{level}' is not a level")).into());
        }
    }
    EnvFilter::try_new(text).map_err(|e| refused(e.to_string()).into())
}

/// Logs to a file, so that the terminal stays free.
pub fn to_file(path: &Path) -> anyhow::Result<()> {
    let file = File::create(path).with_context(|| format!("cannot write the log {}", path.display()))?;
    let filter = EnvFilter::new("info");
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false).with_writer(Mutex::new(file)).init();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_with_a_part_that_would_be_ignored_is_refused() {
        let sound = [
            "",
            "info",
            "WARN",
            "off",
            "headwater_service=debug",
            "info,headwater_nbd=trace,hyper=off",
            "[span]",
        ];
        for text in sound {
            assert!(parse(text).is_ok(), "{text}");
        }
        let odd = [
            "inof",
            "headwater_service",
            "headwater_service=dbug",
            "nonsense=,,",
            "info,",
            "x=",
            "info,inof",
        ];
        for text in odd {
            let error = parse(text).unwrap_err();
            let problem = error.downcast_ref::<Problem>().unwrap();
            assert_eq!(problem.kind, ProblemKind::Invalid, "{text}");
            assert!(problem.to_string().contains("is not a log filter"), "{problem}");
        }
    }
}
