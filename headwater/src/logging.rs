//! Setting the log up.

use std::fs::File;
use std::path::Path;
use std::sync::Mutex;

use anyhow::Context;
use tracing_subscriber::EnvFilter;

use crate::cli::LogFormat;

/// Logs to standard error.
pub fn to_stderr(filter: &str, format: LogFormat) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(filter).with_context(|| format!("'{filter}' is not a log filter"))?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => builder.with_ansi(false).init(),
        LogFormat::Json => builder.json().init(),
    }
    Ok(())
}

/// Logs to a file, so that the terminal stays free.
pub fn to_file(path: &Path) -> anyhow::Result<()> {
    let file = File::create(path).with_context(|| format!("cannot write the log {}", path.display()))?;
    let filter = EnvFilter::new("info");
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false).with_writer(Mutex::new(file)).init();
    Ok(())
}
