//! Client half of `headwater cache list` and `headwater cache set`: finds the sockets of processes that serve volumes
//! ([`super::places`]), and sends them requests. It does not reach machines of the daemon.

use std::io::{Error, ErrorKind};
use std::time::{Duration, Instant};

use anyhow::Context;
use headwater_api::{Problem, ProblemKind};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::UCred;

use super::places::{self, Socket};
use super::{ANSWER_BYTES, Answer, Change, DEADLINE, Process, Request};
use crate::show;

/// The processes of this user that serve volumes; for root those of all users. Processes that do not answer are named
/// on standard error.
pub async fn list() -> anyhow::Result<Vec<Process>> {
    let (own, others) = sockets()?;
    let mut found = answers(own, None).await;
    found.extend(answers(others, Some(Instant::now() + DEADLINE)).await);
    found.sort_by_key(|(_, process)| (process.uid != own_uid(), process.uid, process.pid));
    Ok(found.into_iter().map(|(_, process)| process).collect())
}

/// The sockets of this user's processes, and those of other users'.
fn sockets() -> anyhow::Result<(Vec<Socket>, Vec<Socket>)> {
    let all = places::sockets(&places::socket_dirs(), &places::of_others());
    let all = all.context("cannot look for exports that run")?;
    Ok(all.into_iter().partition(|socket| socket.owner == own_uid()))
}

/// Asks all processes. With `until`, processes of other users must answer by then in total, however many there are.
async fn answers(sockets: Vec<Socket>, until: Option<Instant>) -> Vec<(Socket, Process)> {
    let mut found = Vec::new();
    let left = |until: Instant| until.saturating_duration_since(Instant::now());
    for socket in sockets {
        let longest = until.map_or(DEADLINE, left);
        if longest.is_zero() {
            show::aside(
                "headwater: the exports and attached devices of other users take too long to answer, and some are not listed\n",
            );
            break;
        }
        match ask(&socket, &Request::List, longest).await {
            Ok(process) => found.push((socket, process)),
            // The process has ended, or it died and belonged to another user, who cleans up.
            Err(error) if !socket.path.exists() || is_dead(&error) => {}
            Err(error) => {
                let told = crate::failure::one_line(&error);
                show::aside(&format!("headwater: {}\n", show::printable(&told)));
            }
        }
    }
    found
}

fn is_dead(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Error>().is_some_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Changes the limits of the process with this process id, or that serves this source or device.
pub async fn set(which: &str, change: Change) -> anyhow::Result<Process> {
    let is_meant = |process: &Process| {
        process.pid.to_string() == which
            || process.source == which
            || process.devices.iter().any(|device| {
                device == which || device.strip_prefix("/dev/").is_some_and(|name| name == which)
            })
    };
    let (own, others) = sockets()?;
    let mut meant = answers(own, None).await;
    meant.retain(|(_, process)| is_meant(process));
    // A process of another user with the same name, or that does not answer, must not keep root from its own.
    if meant.is_empty() {
        meant = answers(others, Some(Instant::now() + DEADLINE)).await;
        meant.retain(|(_, process)| is_meant(process));
    }
    match meant.as_slice() {
        [(socket, _)] => ask(socket, &Request::Set(change), DEADLINE).await,
        [] => {
            let whose = if own_uid() == 0 { "" } else { " of this user" };
            let why = format!("no running export or attached device{whose} is '{which}'");
            let problem = Problem::new(ProblemKind::NotFound, why);
            Err(problem.advise("'headwater cache list' shows them").into())
        }
        several => {
            let pids: Vec<_> = several.iter().map(|(_, process)| process.pid.to_string()).collect();
            let why = format!("{} processes serve '{which}'", pids.len());
            let problem = Problem::new(ProblemKind::Conflict, why);
            Err(problem.advise(format!("give one of the processes {}", pids.join(", "))).into())
        }
    }
}

async fn ask(socket: &Socket, request: &Request, longest: Duration) -> anyhow::Result<Process> {
    let mut line = Vec::new();
    // A timeout for the whole exchange: a process of another user could keep root waiting.
    let exchanged = tokio::time::timeout(longest, exchange(socket, request, &mut line)).await;
    let peer = exchanged
        .unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()))
        .with_context(|| format!("the process at {} does not answer", socket.path.display()))?;
    match serde_json::from_slice(&line) {
        Ok(Answer::Caches(mut process)) => {
            process.uid = peer.uid();
            if let Some(pid) = peer.pid().filter(|_| peer.uid() != own_uid()) {
                // Use the kernel's process id for other users' processes, which could lie. Our own may be in a
                // container and knows its id there.
                process.pid = pid.unsigned_abs();
            }
            Ok(process)
        }
        Ok(Answer::Problem(mut problem)) => {
            // Another user could put anything into these texts.
            let texts =
                [&mut problem.message].into_iter().chain(&mut problem.causes).chain(&mut problem.advice);
            texts.for_each(|text| *text = show::printable(text));
            Err(problem.into())
        }
        Err(error) => Err(error).with_context(|| {
            format!("cannot understand the answer of the process at {}", socket.path.display())
        }),
    }
}

async fn exchange(socket: &Socket, request: &Request, line: &mut Vec<u8>) -> std::io::Result<UCred> {
    let mut stream = UnixStream::connect(&socket.path).await?;
    let peer = stream.peer_cred()?;
    if peer.uid() != socket.owner {
        // The path could be a link to another socket, whose process would do this with root's permission.
        let why = format!("it runs as user {}, but its directory is of user {}", peer.uid(), socket.owner);
        return Err(Error::new(ErrorKind::PermissionDenied, why));
    }
    let mut text = serde_json::to_vec(request)?;
    text.push(b'\n');
    stream.write_all(&text).await?;
    BufReader::new(stream).take(ANSWER_BYTES).read_until(b'\n', line).await?;
    Ok(peer)
}
