//! `GET /api/v1/machines/{machine}/console`: the log of a machine's console.

use std::io::SeekFrom;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use headwater_api::Problem;
use serde::Deserialize;
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncSeekExt};
use utoipa::IntoParams;
use uuid::Uuid;

use crate::Service;
use crate::answer::Failure;
use crate::backend::BackendError;
use crate::extract::{Name, Parameters};

/// How often a log is read while a client follows it.
const FOLLOW_INTERVAL_MS: u64 = 200;

/// The size of one read.
const PIECE_BYTES: usize = 64 << 10;

/// The query parameters.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct Query {
    /// Continue with new output until the machine is off or the daemon stops.
    #[serde(default)]
    follow: bool,
}

/// The output of the machine on its serial console since its last start; of more than 16 MiB, the newest part.
#[utoipa::path(
    get,
    path = "/api/v1/machines/{machine}/console",
    security(("token" = ["operator"])),
    tag = "machines",
    params(("machine" = String, Path, description = "Its name"), Query),
    responses(
        (status = 200, description = "The bytes as printed", content_type = "application/octet-stream", body = Vec<u8>),
        (status = 404, description = "No such machine", body = Problem),
    ),
)]
pub(super) async fn read_console(
    State(service): State<Service>,
    Name(name): Name,
    Parameters(how): Parameters<Query>,
) -> Result<Response, Failure> {
    let record = service.record(&name).await?;
    let path = service.hypervisor().console_log(&service.run_dir(&name));
    let content = [(header::CONTENT_TYPE, "application/octet-stream")];
    let file = match File::open(&path).await {
        Ok(file) => file,
        // Never started, so there is no output.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(content.into_response()),
        Err(e) => return Err(BackendError::from_io(format!("cannot read {}", path.display()), e).into()),
    };
    let tail = Tail { file, service, uuid: record.uuid, follow: how.follow, position: 0 };
    Ok((content, Body::from_stream(stream::unfold(tail, Tail::next))).into_response())
}

struct Tail {
    file: File,
    service: Service,
    uuid: Uuid,
    follow: bool,
    position: u64,
}

impl Tail {
    async fn next(mut self) -> Option<(std::io::Result<Bytes>, Self)> {
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            // Check this before reading, so that the last output before the end is included.
            let goes_on =
                self.follow && self.service.active(self.uuid).is_some() && !self.service.is_stopping();
            match self.read(&mut piece).await {
                Ok(0) if !goes_on => return None,
                Ok(0) => tokio::time::sleep(Duration::from_millis(FOLLOW_INTERVAL_MS)).await,
                Ok(n) => {
                    piece.truncate(n);
                    return Some((Ok(Bytes::from(piece)), self));
                }
                Err(e) => return Some((Err(e), Self { follow: false, ..self })),
            }
        }
    }

    async fn read(&mut self, piece: &mut [u8]) -> std::io::Result<usize> {
        let n = self.file.read(piece).await?;
        self.position = self.position.saturating_add(u64::try_from(n).unwrap_or(u64::MAX));
        if n == 0 && self.file.metadata().await?.len() < self.position {
            // A long log is truncated from time to time; then continue at its beginning.
            self.position = self.file.seek(SeekFrom::Start(0)).await?;
        }
        Ok(n)
    }
}
