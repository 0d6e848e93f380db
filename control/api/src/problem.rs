//! How a failure is told: a kind for programs, a message with its causes for people.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What a program needs to know about a failure. A kind exists only where a caller acts differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ProblemKind {
    /// The request makes no sense as it stands: fix it and ask again.
    Invalid,
    /// The request does not say who sends it, or nobody who may: present the token.
    Unauthorized,
    /// The caller is known, and its role does not allow this.
    Forbidden,
    /// What the request names does not exist.
    NotFound,
    /// The request does not fit the present state: in use, already there, running.
    Conflict,
    /// There is not enough disk or memory.
    NoSpace,
    /// Data was read that is not what was written, or a file is not what it claims to be.
    Damaged,
    /// Something that the request needs is missing on the host: QEMU, a daemon that is not stopping.
    Unavailable,
    /// The work was stopped before it was done.
    Cancelled,
    /// Everything else that failed.
    // Also what a later daemon tells apart: its message and advice are shown all the same.
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
            Self::Unauthorized => "The caller is not known",
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

    /// The exit code of the command line (`docs/exit-codes.md`).
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
    /// For programs.
    pub kind: ProblemKind,
    /// What was tried, on what.
    pub message: String,
    /// Why it failed, outermost first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub causes: Vec<String>,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
    /// After how many seconds the same request may work; the answer has it as `Retry-After` too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_s: Option<u32>,
}

impl Problem {
    /// A problem with no further causes.
    pub fn new(kind: ProblemKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), causes: Vec::new(), advice: None, retry_after_s: None }
    }

    /// A problem from an error and its chain of sources.
    pub fn from_error(kind: ProblemKind, error: &dyn std::error::Error) -> Self {
        let mut problem = Self::new(kind, error.to_string());
        problem.push_causes(error.source());
        problem
    }

    /// The same, with what to do.
    #[must_use]
    pub fn advise(mut self, advice: impl Into<String>) -> Self {
        self.advice = Some(advice.into());
        self
    }

    /// The same, inside a wider attempt: `message` becomes the first line, what was the message a cause.
    #[must_use]
    pub fn during(mut self, message: impl Into<String>) -> Self {
        let inner = std::mem::replace(&mut self.message, message.into());
        self.causes.insert(0, inner);
        self
    }

    /// Appends a chain of sources, leaving out links that only repeat the one before.
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

/// The body of every failed request: the members of RFC 9457, and those of the problem.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ProblemDetails {
    /// `tag:headwater,2026:problem/KIND`. An identifier: nothing can be loaded from there.
    #[serde(rename = "type")]
    pub type_uri: String,
    /// The same for each problem of a kind.
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
    /// Of a body that is a [`ProblemDetails`] (RFC 9457, section 3).
    pub const CONTENT_TYPE: &str = "application/problem+json";

    /// The body of an answer with a status.
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
