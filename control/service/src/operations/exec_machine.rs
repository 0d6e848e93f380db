//! `POST /api/v1/machines/{machine}/exec`: run a command in a guest.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use headwater_api::{ExecRequest, ExecResult, MAX_STDIN_BYTES, Problem, ProblemKind};

use crate::Service;
use crate::answer::{Explain, Failure};
use crate::backend::Vm;
use crate::caller::Caller;
use crate::extract::{Body, Name};
use crate::lifecycle::LifecycleError;

/// How long a command may still run after the daemon began to stop. Machines are stopped after all requests have ended.
const STOP_GRACE: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot run a command in machine '{0}': no command was given (argv is empty)")]
    Empty(String),
    #[error("cannot run a command in machine '{0}': the standard input in the request is not valid base64")]
    NoBase64(String),
    #[error(
        "cannot run a command in machine '{0}': the command's standard input is longer than {MAX_STDIN_BYTES} bytes"
    )]
    Long(String),
    #[error("cannot run a command in machine '{machine}': the guest has not booted within {waited_s} s")]
    NotUp { machine: String, waited_s: u64 },
    #[error("cannot run a command in machine '{0}': the machine ended before the guest had booted")]
    Ended(String),
    #[error("the command in machine '{0}' was ended, because the daemon is stopping; run it again later")]
    Stopping(String),
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::Empty(_) | Self::NoBase64(_) | Self::Long(_) => ProblemKind::Invalid,
            Self::NotUp { .. } => ProblemKind::Failed,
            Self::Ended(_) => ProblemKind::Conflict,
            Self::Stopping(_) => ProblemKind::Unavailable,
        }
    }
}

/// Runs a command in the guest through its agent and waits for its end. If the guest is still booting, waits until it has
/// booted first. A command that fails is a result with an exit code, not a failed request.
#[utoipa::path(
    post,
    path = "/api/v1/machines/{machine}/exec",
    security(("token" = ["operator"])),
    tag = "machines",
    params(("machine" = String, Path, description = "Its name")),
    request_body = ExecRequest,
    responses(
        (status = 200, body = ExecResult),
        (status = 400, description = "No command, or a standard input that is too long or not valid base64", body = Problem),
        (status = 404, description = "No such machine", body = Problem),
        (status = 409, description = "The machine is off, or was switched off meanwhile", body = Problem),
        (status = 500, description = "The guest agent does not answer, or the guest has not booted in time", body = Problem),
        (status = 503, description = "The daemon is stopping; a command that ran was ended", body = Problem),
    ),
)]
pub(super) async fn exec_machine(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
    Body(request): Body<ExecRequest>,
) -> Result<Json<ExecResult>, Failure> {
    if request.argv.is_empty() {
        return Err(Error::Empty(name).into());
    }
    let input = input(&name, &request)?;
    let (_, active) = service.on("run a command in", &name).await?;
    active.use_it()?;
    // Arguments may hold secrets: the history names the program only.
    let program = request.argv.first().cloned().unwrap_or_default();
    let event = service.event(&caller, format!("machine {name}"), "exec", program);
    // Not an error if it cannot be written now: on a full disk the command may free space.
    service.note(event).await;
    let timeout = Duration::from_millis(request.timeout_ms);
    let run = async {
        wait_until_up(&*active.vm, &name, timeout).await?;
        let output = active.vm.exec(&request.argv, input, timeout).await;
        Ok::<_, Failure>(output.map_err(LifecycleError::backend("run a command in", &name))?)
    };
    let output = tokio::select! {
        biased;
        output = run => output?,
        // As when its client disconnects, the command is killed.
        () = service.stopping_for(STOP_GRACE) => return Err(Error::Stopping(name.clone()).into()),
    };
    Ok(Json(ExecResult {
        exit_code: output.exit_code,
        stdout_base64: STANDARD.encode(output.stdout),
        stderr_base64: STANDARD.encode(output.stderr),
        truncated: output.truncated,
    }))
}

fn input(name: &str, request: &ExecRequest) -> Result<Vec<u8>, Error> {
    let encoded = request.stdin_base64.as_deref().unwrap_or_default();
    let input = STANDARD.decode(encoded).map_err(|_| Error::NoBase64(name.to_owned()))?;
    if input.len() > MAX_STDIN_BYTES { Err(Error::Long(name.to_owned())) } else { Ok(input) }
}

/// Waits until the guest has booted. Before that its identity is not applied completely.
async fn wait_until_up(vm: &dyn Vm, name: &str, limit: Duration) -> Result<(), Error> {
    tokio::select! {
        biased;
        () = vm.booted() => Ok(()),
        _ = vm.exited() => Err(Error::Ended(name.to_owned())),
        () = tokio::time::sleep(limit) => {
            Err(Error::NotUp { machine: name.to_owned(), waited_s: limit.as_secs() })
        }
    }
}
