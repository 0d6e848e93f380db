//! How operations fail towards the client: one trait on their errors, one answer.

use axum::Json;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
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

    /// After how many seconds the same request may work.
    fn retry_after_s(&self) -> Option<u32> {
        None
    }
}

/// When a request may be sent again that found the database away.
const RETRY_AFTER_S: u32 = 5;

/// The answer to a request that failed.
#[derive(Debug)]
pub(crate) struct Failure(pub(crate) Problem);

/// The problem that an error is.
pub(crate) fn problem(error: &(impl Explain + 'static)) -> Problem {
    let mut problem = Problem::from_error(error.kind(), error);
    problem.advice = error.advice();
    problem.retry_after_s = error.retry_after_s();
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
        let after = problem.retry_after_s.map(|seconds| (header::RETRY_AFTER, HeaderValue::from(seconds)));
        (status, after.into_iter().collect::<HeaderMap>(), Json(problem)).into_response()
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
            DbError::Taken { .. } | DbError::Held { .. } | DbError::Lost { .. } => ProblemKind::Conflict,
            DbError::NoSpace(_) => ProblemKind::NoSpace,
            DbError::Newer { .. }
            | DbError::Foreign { .. }
            | DbError::Damaged(_)
            | DbError::Unreadable { .. } => ProblemKind::Damaged,
            DbError::Away { .. } | DbError::Unsure { .. } => ProblemKind::Unavailable,
            DbError::Open { .. } | DbError::Refused { .. } | DbError::Spoilt | DbError::Failed(_) => {
                ProblemKind::Failed
            }
        }
    }

    fn advice(&self) -> Option<String> {
        match self {
            DbError::NoSpace(_) => Some(
                "free space on the file system of the data directory, which 'headwater status' names"
                    .to_owned(),
            ),
            DbError::Away { .. } => {
                Some("try again in a moment; machines that are on go on meanwhile".to_owned())
            }
            DbError::Unsure { .. } => Some("look whether it was done before you try again".to_owned()),
            _ => None,
        }
    }

    fn retry_after_s(&self) -> Option<u32> {
        matches!(self, DbError::Away { .. }).then_some(RETRY_AFTER_S)
    }
}
