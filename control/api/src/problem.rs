//! The error of a request or task: a kind for programs, and a message, causes and advice for people.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The class of a failure. Kinds differ only if a caller would act differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ProblemKind {
    /// The request is wrong in itself. The same request will fail again.
    Invalid,
    /// The request has no credentials, or invalid ones: send a valid token.
    Unauthorized,
    /// The caller is known, and its role does not allow this.
    Forbidden,
    /// The subject of the request does not exist.
    /// The request conflicts with the present state: in use, already exists, running.
    NotFound,
    /// The request does not fit the present state: in use, already there, running.
    Conflict,
    /// There is not enough disk or memory.
    NoSpace,
    /// Data differs from what was written, or a file is not in the format that it claims.
    Damaged,
    /// A requirement is missing on the host, such as QEMU, or the daemon is stopping.
    Unavailable,
    /// The work was stopped before it was done.
    Cancelled,
    /// Any other failure.
    // Clients also read the unknown kinds of newer daemons as this kind, and show their message and advice.
    #[serde(other)]
    Failed,
}

impl ProblemKind {
    /// The HTTP status that goes with the kind.
    pub const fn http_status(self) -> u16 {
        match self {
            Self::Invalid => 400,
            Self::Unauthorized => 401,
            Self::Forbidden => 403,
            Self::NotFound => 404,
            Self::Conflict => 409,
            Self::NoSpace => 507,
            Self::Damaged => 422,
            Self::Unavailable => 503,
            Self::Cancelled => 499,
            Self::Failed => 500,
        }
    }

    /// The name of the kind in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Invalid => "invalid",
            Self::Unauthorized => "unauthorized",
            Self::Forbidden => "forbidden",
            Self::NotFound => "not_found",
            Self::Conflict => "conflict",
            Self::NoSpace => "no_space",
            Self::Damaged => "damaged",
            Self::Unavailable => "unavailable",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
        }
    }

    /// The kind in a few words.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Invalid => "The request is invalid",
            Self::Unauthorized => "The caller is not authenticated",
            Self::Forbidden => "The caller's role does not allow this",
            Self::NotFound => "The subject does not exist",
            Self::Conflict => "The request conflicts with the present state",
            Self::NoSpace => "There is not enough disk or memory",
            Self::Damaged => "Data is damaged",
            Self::Unavailable => "A required part is not available",
            Self::Cancelled => "The work was cancelled",
            Self::Failed => "The operation failed",
        }
    }

    /// The exit code of the command `headwater` (`docs/exit-codes.md`).
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Failed | Self::Unavailable | Self::Unauthorized | Self::Forbidden => 1,
            Self::Invalid => 2,
            Self::NotFound => 3,
            Self::Conflict => 4,
            Self::NoSpace => 5,
            Self::Damaged => 6,
            Self::Cancelled => 130,
        }
    }
}

/// Why a task or a request failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// The class of the failure, for programs.
    pub kind: ProblemKind,
    /// What was tried, and on what.
    pub message: String,
    /// Why it failed. The first cause is the nearest to `message`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub causes: Vec<String>,
    /// What the user can do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
    /// The number of seconds after which the same request may succeed. It is also the answer's `Retry-After`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_s: Option<u32>,
}

impl Problem {
    /// A problem without causes.
    pub fn new(kind: ProblemKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), causes: Vec::new(), advice: None, retry_after_s: None }
    }

    /// A problem from an error and its chain of sources.
    pub fn from_error(kind: ProblemKind, error: &dyn std::error::Error) -> Self {
        let mut problem = Self::new(kind, error.to_string());
        problem.push_causes(error.source());
        problem
    }

    /// Adds the advice.
    #[must_use]
    pub fn advise(mut self, advice: impl Into<String>) -> Self {
        self.advice = Some(advice.into());
        self
    }

    /// Wraps the problem: `message` becomes the first line, and the previous message the first cause.
    #[must_use]
    pub fn during(mut self, message: impl Into<String>) -> Self {
        let inner = std::mem::replace(&mut self.message, message.into());
        self.causes.insert(0, inner);
        self
    }

    /// Appends a chain of sources. A source with the same text as the one before is left out.
    pub fn push_causes(&mut self, mut source: Option<&(dyn std::error::Error + 'static)>) {
        while let Some(error) = source {
            let text = error.to_string();
            let said = self.causes.last().unwrap_or(&self.message);
            if !said.ends_with(&text) {
                self.causes.push(text);
            }
            source = error.source();
        }
    }
}

/// The body of every failed request: the members of RFC 9457, and the problem.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ProblemDetails {
    /// `tag:headwater,2026:problem/KIND`. An identifier: nothing can be loaded from there.
    #[serde(rename = "type")]
    pub type_uri: String,
    /// A title; the same for each problem of a kind.
    pub title: &'static str,
    /// The status of the answer.
    pub status: u16,
    /// The message, its causes and the advice in one line.
    pub detail: String,
    /// The problem.
    #[serde(flatten)]
    pub problem: Problem,
}

impl ProblemDetails {
    /// The media type of a [`ProblemDetails`] body (RFC 9457, section 3).
    pub const CONTENT_TYPE: &str = "application/problem+json";

    /// The body of an answer with this HTTP status.
    pub fn new(problem: Problem, status: u16) -> Self {
        let kind = problem.kind;
        Self {
            type_uri: format!("tag:headwater,2026:problem/{}", kind.name()),
            title: kind.title(),
            status,
            detail: problem.to_string(),
            problem,
        }
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)?;
        for cause in &self.causes {
            write!(f, ": {cause}")?;
        }
        if let Some(advice) = &self.advice {
            write!(f, " ({advice})")?;
        }
        Ok(())
    }
}

impl std::error::Error for Problem {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_each_kind_is_its_json() {
        use ProblemKind as Kind;
        let kinds = [
            Kind::Invalid,
            Kind::Unauthorized,
            Kind::Forbidden,
            Kind::NotFound,
            Kind::Conflict,
            Kind::NoSpace,
            Kind::Damaged,
            Kind::Unavailable,
            Kind::Cancelled,
            Kind::Failed,
        ];
        for kind in kinds {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
        }
    }

    #[test]
    fn a_problem_reads_as_one_line() {
        let problem = Problem::new(ProblemKind::NoSpace, "disk full")
            .during("cannot import 'a.qcow2'")
            .advise("free some space");
        assert_eq!(problem.to_string(), "cannot import 'a.qcow2': disk full (free some space)");
        let text = serde_json::to_string(&problem).unwrap();
        assert_eq!(serde_json::from_str::<Problem>(&text).unwrap(), problem);
    }

    #[test]
    fn causes_that_repeat_the_message_are_left_out() {
        #[derive(Debug, thiserror::Error)]
        #[error("outer: {0}")]
        struct Outer(#[source] std::io::Error);
        let problem = Problem::from_error(ProblemKind::Failed, &Outer(std::io::Error::other("inner")));
        assert_eq!(problem.to_string(), "outer: inner");
    }
}
