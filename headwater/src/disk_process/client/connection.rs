//! A connection to the disk process.

use std::cell::Cell;
use std::io::{BufReader, ErrorKind, Read};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use headwater_api::ProblemKind;
use headwater_service::backend::{BackendError, TaskControl};
use serde::de::DeserializeOwned;

use crate::disk_process::protocol::{Answer, Call, receive, send};

/// How often it is checked whether it is to be logged that the disk process does not answer yet.
const HOLD_INTERVAL: Duration = Duration::from_secs(5);

/// That is logged after the first interval, and then after each so many.
const HOLD_INTERVALS: u32 = 12;

/// What the daemon waits for while the disk process takes disks over, in words.
pub const WAITS_FOR_DISKS: &str = "waiting for the disk process";

/// The reaction to a call that takes long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waiting {
    GoOn,
    /// Asks the disk process to end the call, and waits for that.
    Cancel,
    /// Waits no longer. The connection is of no use then.
    GiveUp,
}

impl Waiting {
    pub(super) fn unless_cancelled(control: &TaskControl) -> Self {
        if control.is_cancelled() { Self::Cancel } else { Self::GoOn }
    }
}

/// Why a call has no result.
pub(super) enum CallError {
    /// It was not begun, so that it may be made again, whatever it is.
    NotBegun(std::io::Error),
    /// It failed, or its result is unknown.
    Failed(BackendError),
}

impl CallError {
    /// Of a connection that failed before the answer. Linux says that a connection was reset if the other end closed it before all was
    /// read, and the disk process begins a call when it has read all of it.
    fn of(error: std::io::Error) -> Self {
        match error.kind() {
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => Self::NotBegun(error),
            _ => Self::Failed(gone(error)),
        }
    }
}

impl From<CallError> for BackendError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::NotBegun(error) => gone(error),
            CallError::Failed(error) => error,
        }
    }
}

/// A connection to the disk process.
pub struct Connection {
    pub(super) reading: BufReader<UnixStream>,
    pub(super) writing: UnixStream,
    pub(super) line: Vec<u8>,
}

impl Connection {
    pub(super) fn open(socket: &Path) -> std::io::Result<Self> {
        let writing = UnixStream::connect(socket)?;
        Ok(Self { reading: BufReader::new(writing.try_clone()?), writing, line: Vec::new() })
    }

    /// Makes a call, and waits for its answer.
    pub fn call<T: DeserializeOwned>(&mut self, call: &Call) -> Result<T, BackendError> {
        self.long_call(call, &mut |_| {}, &|| Waiting::GoOn)
    }

    /// Holds the disk process, which answers when it has the disks of the process before it. `say` gets what is waited for; the log gets
    /// that too, seldom.
    pub(super) fn hold(&mut self, say: &dyn Fn(&str)) -> Result<(), BackendError> {
        self.writing.set_read_timeout(Some(HOLD_INTERVAL)).map_err(gone)?;
        let (begun, intervals) = (Instant::now(), Cell::new(0));
        let waiting = || {
            if intervals.replace(intervals.get() + 1) % HOLD_INTERVALS == 0 {
                say(WAITS_FOR_DISKS);
                tracing::warn!(
                    waited_s = begun.elapsed().as_secs(),
                    "the disk process does not answer yet: it takes over the disks of the process before it, as its log says, or it is stopped"
                );
            }
            Waiting::GoOn
        };
        self.long_call::<()>(&Call::Hold, &mut |_| {}, &waiting)?;
        self.writing.set_read_timeout(None).map_err(gone)
    }

    /// Makes a call that reports progress. Whenever the read timeout of the connection expires, `waiting` decides
    /// what to do.
    pub(super) fn long_call<T: DeserializeOwned>(
        &mut self,
        call: &Call,
        progress: &mut dyn FnMut(headwater_api::Progress),
        waiting: &dyn Fn() -> Waiting,
    ) -> Result<T, BackendError> {
        Ok(self.attempt(call, progress, waiting)?)
    }

    /// The same, and says whether the call was begun.
    pub(super) fn attempt<T: DeserializeOwned>(
        &mut self,
        call: &Call,
        progress: &mut dyn FnMut(headwater_api::Progress),
        waiting: &dyn Fn() -> Waiting,
    ) -> Result<T, CallError> {
        let failed = |error| CallError::Failed(gone(error));
        send(&mut self.writing, call).map_err(CallError::of)?;
        let mut has_cancelled = false;
        loop {
            let answer = match receive::<Answer>(&mut self.reading, &mut self.line) {
                Ok(Some(answer)) => answer,
                Ok(None) => return Err(failed(ErrorKind::UnexpectedEof.into())),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    match waiting() {
                        Waiting::GoOn => {}
                        Waiting::Cancel if !std::mem::replace(&mut has_cancelled, true) => {
                            // If the connection has ended, reading the answer fails.
                            let _ = self.writing.shutdown(Shutdown::Write);
                        }
                        Waiting::Cancel => {}
                        Waiting::GiveUp => return Err(failed(error)),
                    }
                    continue;
                }
                Err(error) => return Err(CallError::of(error)),
            };
            match answer {
                Answer::Progress(now) => progress(now),
                Answer::Done(value) => return serde_json::from_value(value).map_err(|e| failed(e.into())),
                Answer::Failed(failure) => return Err(CallError::Failed(failure.into())),
                Answer::NotBegun => {
                    return Err(CallError::NotBegun(std::io::Error::other("it hands its disks over")));
                }
            }
        }
    }

    /// Makes a call, and reads the bytes that follow its answer.
    pub fn read(&mut self, call: &Call, into: &mut [u8]) -> Result<(), BackendError> {
        self.call::<()>(call)?;
        let mut rest = into;
        while !rest.is_empty() {
            match self.reading.read(rest) {
                Ok(0) => return Err(gone(ErrorKind::UnexpectedEof.into())),
                Ok(len) => rest = rest.get_mut(len..).unwrap_or_default(),
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::TimedOut
                    ) => {}
                Err(error) => return Err(gone(error)),
            }
        }
        Ok(())
    }
}

/// The disk process cannot be used.
pub(super) fn gone(error: std::io::Error) -> BackendError {
    BackendError::new(ProblemKind::Unavailable, "the disk process does not answer").because(error)
}
