//! `GET /api/v1/machines/{machine}/console/attach`: a connection to a machine's serial console.

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use headwater_api::{Problem, ProblemKind};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::sync::OwnedSemaphorePermit;

use crate::Service;
use crate::answer::{Explain, Failure};
use crate::backend::BackendError;
use crate::caller::Caller;
use crate::console;
use crate::extract::Name;
use crate::lifecycle::Active;

/// The protocol to which the connection is upgraded: the console's bytes in both directions.
pub const PROTOCOL: &str = "headwater-console";

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot attach to the console: the request has no header 'Upgrade: {PROTOCOL}'")]
    NoUpgrade,
    #[error("cannot attach to the console of machine '{machine}': {holder} is attached to it")]
    Taken { machine: String, holder: String },
}

impl Explain for Error {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::NoUpgrade => ProblemKind::Invalid,
            Self::Taken { .. } => ProblemKind::Conflict,
        }
    }

    fn advice(&self) -> Option<String> {
        match self {
            Self::NoUpgrade => None,
            Self::Taken { machine, .. } => Some(format!(
                "only one client can be attached: disconnect that client, or watch with 'headwater machine console {machine} --follow'"
            )),
        }
    }
}

/// Attaches to the serial console: after an upgrade to `headwater-console` the connection carries its bytes in both
/// directions.
/// One client at a time. Output that the client does not read in time is dropped; a line says so.
#[utoipa::path(
    get,
    path = "/api/v1/machines/{machine}/console/attach",
    security(("token" = ["operator"])),
    tag = "machines",
    params(("machine" = String, Path, description = "Its name")),
    responses(
        (status = 101, description = "The connection carries the console's bytes from here on"),
        (status = 400, description = "The request asks for no upgrade", body = Problem),
        (status = 404, description = "No such machine", body = Problem),
        (status = 409, description = "The machine is off, or another client is attached", body = Problem),
    ),
)]
pub(super) async fn attach_console(
    State(service): State<Service>,
    Name(name): Name,
    caller: Caller,
    mut request: Request,
) -> Result<Response, Failure> {
    if request.headers().get(header::UPGRADE) != Some(&HeaderValue::from_static(PROTOCOL)) {
        return Err(Error::NoUpgrade.into());
    }
    let (_, active) = service.on("attach to the console of", &name).await?;
    let (taken, guest) = open_console(&service, &active, &caller.principal).await?;
    let upgrade = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        match upgrade.await {
            // Either side hanging up ends it; there is nobody left to tell.
            Ok(client) => {
                let _ = console::relay(TokioIo::new(client), guest).await;
            }
            Err(e) => tracing::debug!(machine = %name, "a client did not take its console: {e}"),
        }
        drop(taken);
    });
    let headers = [(header::CONNECTION, "upgrade"), (header::UPGRADE, PROTOCOL)];
    Ok((StatusCode::SWITCHING_PROTOCOLS, headers, Body::empty()).into_response())
}

/// Connects `principal` to the console of a running machine. The permit keeps others out until it is dropped.
pub(crate) async fn open_console(
    service: &Service,
    active: &Active,
    principal: &str,
) -> Result<(OwnedSemaphorePermit, UnixStream), Failure> {
    let name = &active.name;
    let taken = active.take_console(principal).await;
    let taken = taken.map_err(|holder| Error::Taken { machine: name.clone(), holder })?;
    active.use_it()?;
    let path = service.hypervisor().console_socket(&service.run_dir(name));
    let guest = UnixStream::connect(&path).await.map_err(|e| {
        BackendError::from_io(format!("cannot connect to the console at {}", path.display()), e)
    })?;
    Ok((taken, guest))
}
