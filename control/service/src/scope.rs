//! The scopes of callers: finds the catalogs and images that a request concerns, and checks that its caller may see them.
//!
//! ```text
//!   path names a catalog, image, machine, task or claim   checked before the handler
//!   operation with the mark `scoped`                      the handler filters or refuses
//!   operation with the mark `everything`, and any other   refused for a caller with scopes
//! ```
//!
//! The mark is declared with the role of the operation, in its security requirement. An operation without a mark and
//! without such a path is refused, so that a new operation is closed until its author has decided.
//!
//! This module does not filter lists: the database does (`Filter::within`).

use headwater_api::scopes::image_of;
use headwater_api::{Problem, ProblemKind, TaskResult};
use headwater_db::{DbError, MachineRecord};
use uuid::Uuid;

use crate::Service;
use crate::answer::problem;
use crate::caller::Caller;

/// The mark of an operation whose handler checks the scopes.
pub(crate) const SCOPED: &str = "scoped";

/// What an operation needs in addition to a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScopeRule {
    /// The subject that the path names must be within the scopes.
    OfPath,
    /// The handler checks the scopes.
    OfHandler,
    /// The caller must have no scopes.
    Everything,
}

/// The parameters of paths whose subjects belong to a catalog or an image.
const OWNED: [&str; 5] = ["catalog", "image", "machine", "task", "claim"];

impl ScopeRule {
    /// The rule of an operation, from its path and its marks.
    pub(crate) fn of(path: &str, mark: Option<&str>) -> Self {
        let is_owned = OWNED.iter().any(|name| path.contains(&format!("{{{name}}}")));
        match mark {
            Some(SCOPED) => Self::OfHandler,
            None if is_owned => Self::OfPath,
            _ => Self::Everything,
        }
    }
}

impl Caller {
    /// Fails if the caller may not see a catalog.
    pub(crate) fn must_have_catalog(&self, catalog: &str) -> Result<(), Problem> {
        match &self.scopes {
            Some(scopes) if !scopes.has_catalog(catalog) => Err(self.lacks(&format!("catalog:{catalog}"))),
            _ => Ok(()),
        }
    }

    /// Fails if the caller may not see an image, given by its name or by a reference.
    pub(crate) fn must_have_image(&self, reference: &str) -> Result<(), Problem> {
        match &self.scopes {
            Some(scopes) if !scopes.has_image(reference) => {
                Err(self.lacks(&format!("image:{}", image_of(reference))))
            }
            _ => Ok(()),
        }
    }

    /// Fails if the caller may not see a machine.
    pub(crate) fn must_have_machine(&self, machine: &MachineRecord) -> Result<(), Problem> {
        match &machine.catalog {
            Some(catalog) => self.must_have_catalog(catalog),
            None => self.must_have_image(&machine.image),
        }
    }

    /// The result of a task as this caller may see it: who uses a version may be machines and images outside of the scopes.
    pub(crate) fn may_see(&self, result: TaskResult) -> TaskResult {
        match result {
            TaskResult::Verified(mut report) if self.scopes.is_some() => {
                report.versions.retain(|version| self.must_have_image(version).is_ok());
                report.uses.clear();
                TaskResult::Verified(report)
            }
            result => result,
        }
    }

    /// Refuses a caller with scopes.
    pub(crate) fn must_have_everything(&self) -> Result<(), Problem> {
        match &self.scopes {
            Some(scopes) => {
                let message = format!(
                    "{} is limited to the scope {scopes}, but this operation needs a caller without scopes",
                    self.principal
                );
                let problem = Problem::new(ProblemKind::Forbidden, message);
                Err(problem.advise("ask for a token without '--catalog' and '--image'"))
            }
            None => Ok(()),
        }
    }

    fn lacks(&self, needed: &str) -> Problem {
        let scopes = self.scopes.as_ref().map(ToString::to_string).unwrap_or_default();
        let message =
            format!("{} is limited to the scope {scopes}, but this operation needs {needed}", self.principal);
        let flag = needed.replacen(':', " ", 1);
        Problem::new(ProblemKind::Forbidden, message)
            .advise(format!("ask for a token with that scope: 'headwater token create .. --{flag}'"))
    }
}

impl Service {
    /// Fails if the caller may not see the subjects that a path names. Names of subjects that do not exist pass; the
    /// handler refuses them.
    pub(crate) async fn must_have_path<'p>(
        &self,
        caller: &Caller,
        parameters: impl Iterator<Item = (&'p str, &'p str)>,
    ) -> Result<(), Problem> {
        for (name, value) in parameters {
            let failed = |error: DbError| {
                let during = format!("cannot look up {name} '{value}' to check the caller's scopes");
                problem(&error).during(during)
            };
            match name {
                "catalog" => caller.must_have_catalog(value)?,
                "image" => caller.must_have_image(value)?,
                "machine" => self.must_have_named_machine(caller, value).await?,
                "task" => {
                    let Ok(id) = value.parse() else { continue };
                    let found = self.db().read().await.map_err(failed)?.tasks().by_id(id).await;
                    if let Some(task) = found.map_err(failed)? {
                        self.must_have_subject(caller, &task.subject, task.created_at_ms).await?;
                    }
                }
                "claim" => {
                    let claims = self.claims(None).await.map_err(failed)?;
                    let id = Uuid::parse_str(value).ok();
                    let found = claims.into_iter().find(|it| Some(it.id) == id || it.machine == value);
                    if let Some(claim) = found {
                        self.must_have_named_machine(caller, &claim.machine).await?;
                    }
                }
                _ => caller.must_have_everything()?,
            }
        }
        Ok(())
    }

    /// Fails if the caller may not see the subject of a task or an event of that time.
    async fn must_have_subject(&self, caller: &Caller, subject: &str, at_ms: u64) -> Result<(), Problem> {
        let failed = |error: DbError| {
            let during = format!("cannot look up {subject} to check the caller's scopes");
            problem(&error).during(during)
        };
        match subject.split_once(' ') {
            Some(("catalog", name)) => caller.must_have_catalog(name),
            Some(("image", reference)) => caller.must_have_image(reference),
            Some(("machine", name)) => {
                let found = self.db().read().await.map_err(failed)?.machines().by_name(name).await;
                match found.map_err(failed)? {
                    Some(machine) if machine.created_at_ms <= at_ms => caller.must_have_machine(&machine),
                    // The owner of a machine that was removed is unknown.
                    _ => caller.must_have_everything(),
                }
            }
            _ => caller.must_have_everything(),
        }
    }

    /// Fails if the caller may not see the machine that has this name now.
    pub(crate) async fn must_have_named_machine(&self, caller: &Caller, name: &str) -> Result<(), Problem> {
        let failed = |error: DbError| {
            let during = format!("cannot look up machine '{name}' to check the caller's scopes");
            problem(&error).during(during)
        };
        let found = self.db().read().await.map_err(failed)?.machines().by_name(name).await;
        match found.map_err(failed)? {
            Some(machine) => caller.must_have_machine(&machine),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
