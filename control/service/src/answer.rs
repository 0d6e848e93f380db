//! Converts the errors of operations to the answer that the client gets ([`Problem`]).

use axum::Json;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use headwater_api::{Problem, ProblemDetails, ProblemKind};
use headwater_db::DbError;

use crate::backend::BackendError;

/// What a client needs to know about the error of an operation.
pub(crate) trait Explain: std::error::Error {
    /// The kind, for programs.
    fn kind(&self) -> ProblemKind;

    /// What the user can do.
    fn advice(&self) -> Option<String> {
        None
    }

    /// After how many seconds the same request may work.
    fn retry_after_s(&self) -> Option<u32> {
        None
    }
}

/// When a client may repeat a request that failed because the database could not be reached.
const RETRY_AFTER_S: u32 = 5;

/// The answer to a request that failed.
#[derive(Debug)]
pub(crate) struct Failure(pub(crate) Problem);

/// Converts an error to a problem.
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

impl Failure {
    /// The answer with another HTTP status than that of the problem's kind.
    pub(crate) fn with_status(self, status: StatusCode) -> Response {
        let Self(problem) = self;
        if problem.kind == ProblemKind::Failed {
            tracing::error!("{problem}");
        }
        let content_type = HeaderValue::from_static(ProblemDetails::CONTENT_TYPE);
        let mut headers = HeaderMap::new();
        if let Some(seconds) = problem.retry_after_s {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        let mut response =
            (status, headers, Json(ProblemDetails::new(problem, status.as_u16()))).into_response();
        response.headers_mut().insert(header::CONTENT_TYPE, content_type);
        response
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.kind.http_status());
        self.with_status(status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR))
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
            DbError::OtherSecretsKey { .. } => ProblemKind::Invalid,
            DbError::Open { .. }
            | DbError::Refused { .. }
            | DbError::StatementFailed
            | DbError::NoSecretsKey
            | DbError::NotEncrypted
            | DbError::WithoutSecrets { .. }
            | DbError::Failed(_) => ProblemKind::Failed,
        }
    }

    fn advice(&self) -> Option<String> {
        match self {
            DbError::NoSpace(_) => Some(
                "free space on the file system of the data directory, which 'headwater status' names"
                    .to_owned(),
            ),
            DbError::Away { .. } => {
                Some("try again in a moment; machines that are on keep running".to_owned())
            }
            DbError::Unsure { .. } => {
                Some("check whether the change was made before you try again".to_owned())
            }
            _ => None,
        }
    }

    fn retry_after_s(&self) -> Option<u32> {
        matches!(self, DbError::Away { .. }).then_some(RETRY_AFTER_S)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_failure_has_the_members_of_rfc_9457() {
        let mut problem = Problem::new(ProblemKind::Unavailable, "cannot write").advise("try again");
        problem.causes.push("the database is away".to_owned());
        problem.retry_after_s = Some(5);
        let response = Failure(problem).into_response();
        assert_eq!(response.status(), 503);
        assert_eq!(response.headers()[header::CONTENT_TYPE], "application/problem+json");
        assert_eq!(response.headers()[header::RETRY_AFTER], "5");
        let body = axum::body::to_bytes(response.into_body(), 1 << 16).await.unwrap();
        let expected = serde_json::json!({
            "type": "tag:headwater,2026:problem/unavailable",
            "title": "A required part is not available",
            "status": 503,
            "detail": "cannot write: the database is away (try again)",
            "kind": "unavailable",
            "message": "cannot write",
            "causes": ["the database is away"],
            "advice": "try again",
            "retry_after_s": 5,
        });
        assert_eq!(serde_json::from_slice::<serde_json::Value>(&body).unwrap(), expected);
    }

    #[tokio::test]
    async fn a_status_of_its_own_is_in_the_body_too() {
        let failure = Failure(Problem::new(ProblemKind::Invalid, "no such method"));
        let response = failure.with_status(StatusCode::METHOD_NOT_ALLOWED);
        assert_eq!(response.status(), 405);
        let body = axum::body::to_bytes(response.into_body(), 1 << 16).await.unwrap();
        assert_eq!(serde_json::from_slice::<serde_json::Value>(&body).unwrap()["status"], 405);
    }
}
