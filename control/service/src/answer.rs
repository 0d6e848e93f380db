//! How operations fail towards the client: one trait on their errors, one answer.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use headwater_api::{Problem, ProblemKind};
use headwater_db::DbError;

use crate::backend::BackendError;

/// An error of an operation, as a client needs it.
pub(crate) trait Explain: std::error::Error {
    /// What a program may do about it.
    fn kind(&self) -> ProblemKind;

    /// What a person may do about it.
    fn advice(&self) -> Option<String> {
        None
    }
}

/// The answer to a request that failed.
#[derive(Debug)]
pub(crate) struct Failure(pub(crate) Problem);

/// The problem that an error is.
pub(crate) fn problem(error: &(impl Explain + 'static)) -> Problem {
    let mut problem = Problem::from_error(error.kind(), error);
    problem.advice = error.advice();
    problem
}

impl<E: Explain + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        Self(problem(&error))
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let Self(problem) = self;
        if problem.kind == ProblemKind::Failed {
            tracing::error!("{problem}");
        }
        let status =
            StatusCode::from_u16(problem.kind.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, Json(problem)).into_response()
    }
}

impl Explain for BackendError {
    fn kind(&self) -> ProblemKind {
        BackendError::kind(self)
    }

    fn advice(&self) -> Option<String> {
        BackendError::advice(self).map(str::to_owned)
    }
}

impl Explain for DbError {
    fn kind(&self) -> ProblemKind {
        match self {
            DbError::Taken { .. } => ProblemKind::Conflict,
            DbError::NoSpace(_) => ProblemKind::NoSpace,
            DbError::Newer { .. }
            | DbError::Foreign { .. }
            | DbError::Damaged(_)
            | DbError::Unreadable { .. } => ProblemKind::Damaged,
            DbError::Open { .. } | DbError::Failed(_) => ProblemKind::Failed,
        }
    }

    fn advice(&self) -> Option<String> {
        let full = "free space on the file system of the data directory, which 'headwater status' names";
        matches!(self, DbError::NoSpace(_)).then(|| full.to_owned())
    }
}
