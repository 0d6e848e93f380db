//! The side of `headwater cache`.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;

use anyhow::Context;
use headwater_api::{Problem, ProblemKind};

use super::{ANSWER_BYTES, Answer, Change, DEADLINE, Process, Request, places};
use crate::show;

/// Processes of this user that serve volumes. Those that do not answer are named on the standard error.
pub fn list() -> anyhow::Result<Vec<Process>> {
    let sockets = places::sockets(&places::usual()).context("cannot look for exports that run")?;
    let mut processes = Vec::new();
    for path in sockets {
        match ask(&path, &Request::List) {
            Ok(process) => processes.push(process),
            // It ended meanwhile.
            Err(_) if !path.exists() => {}
            Err(error) => show::aside(&format!("headwater: {}\n", crate::failure::one_line(&error))),
        }
    }
    processes.sort_by_key(|process| process.pid);
    Ok(processes)
}

/// Changes the limits of the process with this number, or that serves this source or device.
pub fn set(which: &str, change: Change) -> anyhow::Result<Process> {
    let processes = list()?;
    let is_meant = |process: &&Process| {
        process.pid.to_string() == which
            || process.source == which
            || process.devices.iter().any(|device| {
                device == which || device.strip_prefix("/dev/").is_some_and(|name| name == which)
            })
    };
    let meant: Vec<_> = processes.iter().filter(is_meant).collect();
    let process = match meant.as_slice() {
        [process] => process,
        [] => {
            let why = format!("no export or attached device of this user that runs is '{which}'");
            let problem = Problem::new(ProblemKind::NotFound, why);
            return Err(problem.advise("'headwater cache list' shows them").into());
        }
        several => {
            let pids: Vec<_> = several.iter().map(|process| process.pid.to_string()).collect();
            let why = format!("{} processes serve '{which}'", pids.len());
            let problem = Problem::new(ProblemKind::Conflict, why);
            return Err(problem.advise(format!("give one of the processes {}", pids.join(", "))).into());
        }
    };
    let sockets = places::sockets(&places::usual()).context("cannot look for exports that run")?;
    let name = format!("{}.sock", process.pid);
    let path = sockets.iter().find(|path| path.file_name().is_some_and(|it| it == name.as_str()));
    let path = path.with_context(|| format!("process {} ended meanwhile", process.pid))?;
    ask(path, &Request::Set(change))
}

fn ask(path: &Path, request: &Request) -> anyhow::Result<Process> {
    let mut line = Vec::new();
    exchange(path, request, &mut line)
        .with_context(|| format!("the process at {} does not answer", path.display()))?;
    match serde_json::from_slice(&line) {
        Ok(Answer::Caches(process)) => Ok(process),
        Ok(Answer::Problem(problem)) => Err(problem.into()),
        Err(error) => Err(error)
            .with_context(|| format!("cannot understand the answer of the process at {}", path.display())),
    }
}

fn exchange(path: &Path, request: &Request, line: &mut Vec<u8>) -> std::io::Result<()> {
    let mut stream = places::connect(path)?;
    stream.set_read_timeout(Some(DEADLINE))?;
    stream.set_write_timeout(Some(DEADLINE))?;
    let mut text = serde_json::to_vec(request)?;
    text.push(b'\n');
    stream.write_all(&text)?;
    BufReader::new(stream).take(ANSWER_BYTES).read_until(b'\n', line).map(drop)
}
