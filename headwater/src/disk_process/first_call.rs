//! Waits for the first daemon on one thread, before the disk process knows its settings. Called by [`super::server`] when the process
//! starts.
//!
//! The permitted actions depend on the settings, and only a process with a single thread can give up its other permissions
//! ([`super::sandbox`]). The connections of this time are handed on, and are served by threads afterwards.

use std::io::BufReader;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use headwater_api::{Problem, ProblemKind};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::protocol::{Answer, Call, Failure, VERSION, Welcome, receive, send};
use super::server::Options;
use super::settings::Settings;

/// How long the process waits for its first daemon.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// How often it is looked whether somebody still wants the process.
const LOOK_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// How long the rest of a line may take.
const LINE_PATIENCE: Duration = Duration::from_secs(5);

/// The most connections at a time.
const MAX_CONNECTIONS: usize = 16;

/// A connection that was opened before the settings were known.
pub struct Early {
    pub stream: UnixStream,
    /// Whether the connection is held: a daemon uses the disks as long as it is open.
    pub is_held: bool,
    /// A call without an answer yet.
    pub call: Option<Call>,
}

/// Waits for a daemon that sends settings. `None`: no daemon came in time, or it cannot use this process.
pub fn wait(
    listener: &UnixListener,
    socket: &Path,
    options: Options,
) -> anyhow::Result<Option<(Settings, Vec<Early>)>> {
    let begun = Instant::now();
    let mut connections: Vec<Early> = Vec::new();
    loop {
        let is_late = options.ends_unused && connections.is_empty() && begun.elapsed() > PATIENCE;
        if is_late || matches!(socket.try_exists(), Ok(false)) {
            return Ok(None);
        }
        let Some(ready) = ready(listener, &connections)? else { continue };
        let Some(index) = ready else {
            if let Ok((stream, _)) = listener.accept()
                && connections.len() < MAX_CONNECTIONS
                && stream.set_read_timeout(Some(LINE_PATIENCE)).is_ok()
            {
                connections.push(Early { stream, is_held: false, call: None });
            }
            continue;
        };
        let mut connection = connections.remove(index);
        match answer(&mut connection, options) {
            Said::More => connections.push(connection),
            Said::Nothing => {}
            Said::Ends => return Ok(None),
            Said::Begin(settings) => {
                connections.push(connection);
                for connection in &connections {
                    connection.stream.set_read_timeout(None)?;
                }
                return Ok(Some((*settings, connections)));
            }
        }
    }
}

/// Finds the connection that has data. `Some(None)`: a new connection is waiting.
fn ready(listener: &UnixListener, connections: &[Early]) -> std::io::Result<Option<Option<usize>>> {
    let streams = connections.iter().map(|connection| connection.stream.as_fd());
    let all = streams.chain([listener.as_fd()]);
    let mut fds: Vec<_> = all.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    match rustix::event::poll(&mut fds, Some(&LOOK_INTERVAL)) {
        Err(rustix::io::Errno::INTR) => return Ok(None),
        other => other?,
    };
    let first = fds.iter().position(|fd| !fd.revents().is_empty());
    Ok(first.map(|index| (index < connections.len()).then_some(index)))
}

/// The effect of a message.
enum Said {
    More,
    /// The connection has ended.
    Nothing,
    Begin(Box<Settings>),
    /// This daemon cannot use the process, so the process ends.
    Ends,
}

fn answer(connection: &mut Early, options: Options) -> Said {
    let Early { stream, is_held, call } = connection;
    let Ok(copy) = stream.try_clone() else { return Said::Nothing };
    // A client sends one call at a time, so the buffer holds nothing else.
    let received = receive::<Call>(&mut BufReader::new(copy), &mut Vec::new());
    let failed = |kind, message: String| Answer::Failed(Failure::of(Problem::new(kind, message)));
    let reply = match received {
        Ok(Some(Call::Hold)) => {
            *is_held = true;
            Answer::Done(serde_json::Value::Null)
        }
        Ok(Some(Call::Begin { version, .. })) if version != VERSION => {
            let ends = serde_json::to_value(Welcome::Ends { restarted: !options.ends_unused });
            // If the daemon has ended, there is nobody to answer.
            let _ = send(stream, &Answer::Done(ends.unwrap_or_default()));
            return Said::Ends;
        }
        Ok(Some(Call::Begin { version, settings })) => {
            match serde_json::from_value::<Settings>(settings.clone()) {
                Ok(known) => {
                    *call = Some(Call::Begin { version, settings });
                    return Said::Begin(Box::new(known));
                }
                Err(error) => failed(ProblemKind::Invalid, format!("cannot parse the settings: {error}")),
            }
        }
        Ok(Some(_)) => failed(ProblemKind::Conflict, "the disk process has no settings".to_owned()),
        Ok(None) | Err(_) => return Said::Nothing,
    };
    if send(stream, &reply).is_ok() { Said::More } else { Said::Nothing }
}
