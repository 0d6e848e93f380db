//! `headwater doctor`: checks whether this host can run machines, and says what to do if it cannot.
//!
//! Each check says what it tried. `fail` means that machines or the daemon do not work, `warn` that they work slowly or without a
//! feature. Nothing is changed, and nothing is written unless `--write` asks for it.

mod disk;
mod host;

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::cli::DoctorArgs;
use crate::config::{self, Effective, SYSTEM_FILE, serve_with};
use crate::data_dir::DataDir;
use crate::show;

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// Nothing to do.
    Ok,
    /// Something is slow or missing.
    Warn,
    /// Something does not work.
    Fail,
}

/// A check and its result.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// The subject of the check.
    pub check: &'static str,
    /// The result.
    pub outcome: Outcome,
    /// What was tried, and what was found.
    pub found: String,
    /// The advice for the administrator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

impl Check {
    fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self { check, outcome: Outcome::Ok, found: found.into(), advice: None }
    }

    fn warn(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { check, outcome: Outcome::Warn, found: found.into(), advice: Some(advice.into()) }
    }

    fn fail(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { check, outcome: Outcome::Fail, found: found.into(), advice: Some(advice.into()) }
    }
}

/// Runs all checks. The exit code is 1 if one of them failed.
pub async fn run(data_dir: Option<PathBuf>, args: DoctorArgs, json: bool) -> anyhow::Result<u8> {
    let given = args.config.is_some();
    let file = args.config.or_else(|| Path::new(SYSTEM_FILE).exists().then(|| SYSTEM_FILE.into()));
    let (settings, mut checks) = configured(file.as_deref());
    // The system's file may be that of another daemon. So without --config, the directory is the one that all other
    // commands use.
    let configured_dir = settings.as_ref().filter(|_| given).and_then(Effective::data_dir);
    let dir = DataDir::of_daemon(data_dir.or(configured_dir))?;
    checks.extend(host::qemu().await);
    checks.push(host::qemu_img());
    checks.push(host::ovmf());
    checks.push(host::swtpm());
    checks.push(host::io_uring());
    checks.push(host::landlock());
    checks.push(host::locked_memory());
    checks.push(host::huge_pages());
    let (service, answers) = host::daemon(&dir).await;
    checks.push(service);
    checks.extend(disk::data_directory(dir.path(), args.write));
    checks.extend(host::ports(settings.as_ref(), answers));
    checks.push(host::clock());
    let code = u8::from(checks.iter().any(|check| check.outcome == Outcome::Fail));
    show::if_read(if json { show::json(&serde_json::json!({ "checks": checks })) } else { lines(&checks) })?;
    Ok(code)
}

fn configured(file: Option<&Path>) -> (Option<Effective>, Vec<Check>) {
    const CHECK: &str = "configuration";
    let Some(file) = file else { return (None, Vec::new()) };
    match Effective::of(serve_with(Some(file))) {
        Ok(settings) => {
            let keys = config::read(file).map_or(0, |keys| keys.len());
            (
                Some(settings),
                vec![Check::ok(CHECK, format!("{} is valid, {keys} keys are set", file.display()))],
            )
        }
        Err(error) => {
            let advice = "correct the file, and check it with 'headwater config check'";
            (None, vec![Check::fail(CHECK, crate::failure::one_line(&error), advice)])
        }
    }
}

fn lines(checks: &[Check]) -> anyhow::Result<()> {
    let width = checks.iter().map(|check| check.check.len()).max().unwrap_or(0);
    let mut text = Vec::new();
    for check in checks {
        let word = match check.outcome {
            Outcome::Ok => "ok  ",
            Outcome::Warn => "warn",
            Outcome::Fail => "fail",
        };
        text.push(format!("{word}  {:width$}  {}", check.check, show::printable(&check.found)));
        if let Some(advice) = &check.advice {
            text.push(format!("      {:width$}  -> {}", "", show::printable(advice)));
        }
    }
    let count = |outcome| checks.iter().filter(|check| check.outcome == outcome).count();
    let (ok, warn, fail) = (count(Outcome::Ok), count(Outcome::Warn), count(Outcome::Fail));
    text.push(format!("{ok} ok, {warn} warnings, {fail} failed"));
    show::line(&text.join("\n"))
}
