//! Errors of commands: one line for people, a problem for programs, and an exit code for scripts.

use std::io::ErrorKind;
use std::process::ExitCode;

use headwater_api::{Problem, ProblemKind};
use headwater_block::{IoError, IoErrorKind};
use headwater_connections::BindError;
use headwater_db::DbError;
use headwater_image::{ImageError, ImageErrorKind};
use headwater_iscsi::chap_file::ChapFileError;
use headwater_nbd::TlsError;
use headwater_service::backend::BackendError;
use headwater_service::server::ListenError;
use headwater_service::token::TokenError;
use headwater_store::{StoreError, StoreErrorKind};
use headwater_store_server::ServeError;

/// The exit code for an invalid command line, request or file.
pub const USAGE: u8 = 2;

/// The exit code if no daemon answers.
pub const UNREACHABLE: u8 = 7;

/// The exit code for data that cannot be used: damaged, foreign, or of a later release.
pub const DAMAGED: u8 = 6;

/// No daemon answers on its socket.
#[derive(Debug, thiserror::Error)]
#[error("cannot reach the daemon at {socket}: {reason} ({advice})")]
pub struct Unreachable {
    /// The socket.
    pub socket: String,
    /// Why.
    pub reason: String,
    /// What to do.
    pub advice: &'static str,
}

/// Another daemon uses the data directory.
#[derive(Debug, thiserror::Error)]
#[error(
    "the data directory {data_dir} is in use by process {holder} (stop that process, use its socket, or choose \
     another directory with --data-dir)"
)]
pub struct Locked {
    /// The directory.
    pub data_dir: String,
    /// The process that holds the lock, as its lock file says.
    pub holder: String,
}

/// An invalid request.
pub fn invalid(why: impl Into<String>) -> anyhow::Error {
    Problem::new(ProblemKind::Invalid, why).into()
}

/// An invalid command line, without the usage text.
pub fn usage(error: &clap::Error) -> anyhow::Error {
    invalid(usage_line(error))
}

/// The error of an invalid command line as one line.
pub fn usage_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let told = text.split("\n\nUsage:").next().unwrap_or_default();
    let words: Vec<&str> = told.split_whitespace().collect();
    let line = words.join(" ");
    line.strip_prefix("error: ").unwrap_or(&line).to_owned()
}

/// Prints an error, and returns its exit code. Closed output is success.
pub fn report(error: &anyhow::Error, json: bool) -> ExitCode {
    if is_closed_output(error) {
        // The reader of the output, for instance `head`, has ended.
        return ExitCode::SUCCESS;
    }
    tell(error, json);
    ExitCode::from(exit_code(error))
}

/// Prints an error, for people or for programs.
pub fn tell(error: &anyhow::Error, json: bool) {
    // If standard error is closed, only the exit code is left.
    crate::show::aside(&format!("{}\n", told(error, json)));
}

/// The error for programs.
pub fn problem(error: &anyhow::Error) -> Problem {
    let code = exit_code(error);
    error.downcast_ref::<Problem>().cloned().unwrap_or_else(|| as_problem(error, code))
}

/// The text of an error. Text from a disk or a server must not control the terminal; JSON escapes it.
fn told(error: &anyhow::Error, json: bool) -> String {
    if json {
        serde_json::to_string(&problem(error)).unwrap_or_default()
    } else {
        crate::show::printable(&format!("headwater: {}", one_line(error)))
    }
}

/// The error and its causes in one line. A cause that repeats the text before is left out.
pub fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for link in error.chain() {
        let text = link.to_string();
        if line.is_empty() {
            line = text;
        } else if !line.ends_with(&text) {
            line = format!("{line}: {text}");
        }
    }
    line.replace('\n', " ")
}

fn as_problem(error: &anyhow::Error, code: u8) -> Problem {
    use ProblemKind::{Cancelled, Conflict, Damaged, Failed, Invalid, NoSpace, NotFound, Unavailable};
    let kinds = [Invalid, NotFound, Conflict, NoSpace, Damaged, Cancelled];
    let kind = kinds.into_iter().find(|kind| kind.exit_code() == code);
    let fallback = if code == UNREACHABLE { Unavailable } else { Failed };
    Problem::new(kind.unwrap_or(fallback), one_line(error))
}

fn is_closed_output(error: &anyhow::Error) -> bool {
    error.downcast_ref::<crate::show::OutputClosed>().is_some()
}

/// The exit code of the first cause that has one.
fn exit_code(error: &anyhow::Error) -> u8 {
    error.chain().find_map(code_of_link).unwrap_or(1)
}

fn code_of_link(link: &(dyn std::error::Error + 'static)) -> Option<u8> {
    if let Some(problem) = link.downcast_ref::<Problem>() {
        return Some(problem.kind.exit_code());
    }
    if let Some(error) = link.downcast_ref::<BackendError>() {
        // For a plain failure, its cause may be more specific.
        return Some(error.kind()).filter(|kind| *kind != ProblemKind::Failed).map(ProblemKind::exit_code);
    }
    if let Some(error) = link.downcast_ref::<ChapFileError>() {
        return match error {
            ChapFileError::Read { source, .. } if source.kind() != ErrorKind::InvalidData => {
                code_of_link(source)
            }
            _ => Some(USAGE),
        };
    }
    if link.is::<Unreachable>() {
        return Some(UNREACHABLE);
    }
    if link.is::<Locked>() {
        return Some(ProblemKind::Conflict.exit_code());
    }
    if let Some(error) = link.downcast_ref::<DbError>() {
        return match error {
            DbError::Newer { .. }
            | DbError::Foreign { .. }
            | DbError::Damaged(_)
            | DbError::Unreadable { .. } => Some(DAMAGED),
            DbError::NoSpace(_) => Some(ProblemKind::NoSpace.exit_code()),
            DbError::Held { .. } | DbError::Lost { .. } => Some(ProblemKind::Conflict.exit_code()),
            DbError::OtherSecretsKey { .. } => Some(ProblemKind::Invalid.exit_code()),
            DbError::Away { .. }
            | DbError::Unsure { .. }
            | DbError::Refused { .. }
            | DbError::StatementFailed
            | DbError::NoSecretsKey
            | DbError::NotEncrypted
            | DbError::WithoutSecrets { .. } => None,
            // Its cause may say more.
            DbError::Open { .. } | DbError::Taken { .. } | DbError::Failed(_) => None,
        };
    }
    if let Some(TokenError::Odd { .. }) = link.downcast_ref() {
        return Some(DAMAGED);
    }
    if let Some(error) = link.downcast_ref::<StoreError>() {
        return Some(store_kind(error.kind()).exit_code());
    }
    if let Some(error) = link.downcast_ref::<ImageError>() {
        return Some(image_kind(error.kind()).exit_code());
    }
    if let Some(error) = link.downcast_ref::<IoError>() {
        return match error.kind() {
            // A request may be invalid only in the present state; the cause then has the exit code.
            IoErrorKind::Invalid => Some(link.source().and_then(code_of_link).unwrap_or(USAGE)),
            IoErrorKind::NoSpace => Some(ProblemKind::NoSpace.exit_code()),
            IoErrorKind::Corrupt => Some(ProblemKind::Damaged.exit_code()),
            _ => None,
        };
    }
    if let Some(kind) = listen_kind(link) {
        return Some(kind.exit_code());
    }
    match link.downcast_ref() {
        Some(ServeError::Invalid(_) | ServeError::Tls { .. }) => return Some(USAGE),
        Some(ServeError::Listen { source, .. }) => {
            return may_not_listen(source).map(ProblemKind::exit_code).or_else(|| code_of_link(source));
        }
        _ => {}
    }
    if let Some(TlsError::Missing { .. }) = link.downcast_ref() {
        return Some(ProblemKind::NotFound.exit_code());
    }
    match link.downcast_ref::<std::io::Error>()?.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
            Some(ProblemKind::NoSpace.exit_code())
        }
        ErrorKind::NotFound => Some(ProblemKind::NotFound.exit_code()),
        ErrorKind::AddrInUse | ErrorKind::AlreadyExists | ErrorKind::ResourceBusy => {
            Some(ProblemKind::Conflict.exit_code())
        }
        _ => None,
    }
}

/// The kind of an error of listening; `None`: the cause decides.
fn listen_kind(link: &(dyn std::error::Error + 'static)) -> Option<ProblemKind> {
    use ProblemKind::{Conflict, Invalid, NotFound};
    if let Some(error) = link.downcast_ref() {
        return match error {
            BindError::PathInUse { .. } | BindError::PortInUse { .. } | BindError::NotASocket { .. } => {
                Some(Conflict)
            }
            BindError::NoDirectory { .. } => Some(NotFound),
            BindError::PathTooLong { .. } => Some(Invalid),
            BindError::UnknownHost { .. } | BindError::NotOurs { .. } => Some(Invalid),
            BindError::System { source, .. } => may_not_listen(source),
        };
    }
    match link.downcast_ref() {
        Some(ListenError::Failed { source, .. }) => may_not_listen(source),
        Some(ListenError::InUse { .. } | ListenError::NotASocket { .. }) => Some(Conflict),
        Some(ListenError::NotLoopback { .. } | ListenError::TooLong { .. }) => Some(Invalid),
        _ => None,
    }
}

/// The kind if this process or host may not listen on an address. Other errors have their own codes.
fn may_not_listen(source: &std::io::Error) -> Option<ProblemKind> {
    let is_refused = matches!(source.kind(), ErrorKind::PermissionDenied | ErrorKind::AddrNotAvailable);
    is_refused.then_some(ProblemKind::Invalid)
}

/// Converts an error kind of the store.
pub fn store_kind(kind: StoreErrorKind) -> ProblemKind {
    match kind {
        StoreErrorKind::NotFound => ProblemKind::NotFound,
        StoreErrorKind::Invalid | StoreErrorKind::ReadOnly => ProblemKind::Invalid,
        StoreErrorKind::InUse | StoreErrorKind::Locked => ProblemKind::Conflict,
        StoreErrorKind::Damaged | StoreErrorKind::UnknownFormat => ProblemKind::Damaged,
        StoreErrorKind::NoSpace => ProblemKind::NoSpace,
        StoreErrorKind::Unreachable | StoreErrorKind::Unknown | StoreErrorKind::Io => ProblemKind::Failed,
    }
}

/// Converts an error kind of images.
pub fn image_kind(kind: ImageErrorKind) -> ProblemKind {
    match kind {
        ImageErrorKind::NotFound => ProblemKind::NotFound,
        ImageErrorKind::Invalid | ImageErrorKind::Unchanged => ProblemKind::Invalid,
        ImageErrorKind::Unsupported | ImageErrorKind::Damaged => ProblemKind::Damaged,
        ImageErrorKind::Busy => ProblemKind::Conflict,
        ImageErrorKind::NoSpace => ProblemKind::NoSpace,
        ImageErrorKind::Cancelled => ProblemKind::Cancelled,
        ImageErrorKind::Unknown | ImageErrorKind::Io => ProblemKind::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn the_first_link_that_has_a_code_decides() {
        let full = std::io::Error::from(ErrorKind::StorageFull);
        let error = Err::<(), _>(full).context("cannot write x").unwrap_err();
        assert_eq!(exit_code(&error), 5);
        assert_eq!(exit_code(&anyhow::anyhow!("odd")), 1);
        let problem = Problem::new(ProblemKind::Conflict, "in use");
        assert_eq!(exit_code(&anyhow::Error::new(problem).context("cannot remove")), 4);
        let may_not = || std::io::Error::from(ErrorKind::PermissionDenied);
        let address = || "tcp:127.0.0.1:99".to_owned();
        for refused in [
            anyhow::Error::new(BindError::System { address: address(), source: may_not() }),
            anyhow::Error::new(BindError::UnknownHost { address: address(), source: may_not() }),
            anyhow::Error::new(ListenError::Failed { what: address(), source: may_not() }),
            anyhow::Error::new(ServeError::Listen { on: address(), source: may_not() }),
        ] {
            assert_eq!(exit_code(&refused), 2, "{refused}");
        }
        let swapped = ServeError::Tls { file: "key.pem".into(), why: "it holds no private key".to_owned() };
        assert_eq!(exit_code(&anyhow::Error::new(swapped)), 2);
        let newer = DbError::Newer { path: "db".to_owned(), format: 9, known: 8 };
        assert_eq!(exit_code(&anyhow::Error::new(newer)), 6);
        let source = Box::new(DbError::Damaged("malformed".to_owned()));
        assert_eq!(exit_code(&anyhow::Error::new(DbError::Open { path: "db".to_owned(), source })), 6);
    }

    #[test]
    fn an_error_is_one_line_without_repetition() {
        let error = anyhow::anyhow!("reason").context("cannot open x: reason").context("cannot\nrun");
        assert_eq!(one_line(&error), "cannot run: cannot open x: reason");
    }

    #[test]
    fn an_error_does_not_steer_the_terminal() {
        let error =
            anyhow::anyhow!("its backing file is \u{1b}]0;x\u{7}\u{9b}2J\r\nx").context("cannot read y");
        assert_eq!(told(&error, false), "headwater: cannot read y: its backing file is  ]0;x  2J  x");
        assert!(told(&error, true).bytes().all(|byte| byte >= b' '), "{}", told(&error, true));
    }
}
