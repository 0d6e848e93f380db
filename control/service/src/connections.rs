//! Connections to clouds as the operations use them: looks one up with its secret, and finds the clouds.

use std::sync::Arc;

use headwater_api::{Problem, ProblemKind};
use headwater_db::{ConnectionRecord, DbError};

use crate::Service;
use crate::answer::Explain;
use crate::backend::Cloud;

/// A connection that cannot be looked up.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoConnection {
    #[error("there is no connection '{0}'")]
    Unknown(String),
    #[error(transparent)]
    Db(#[from] DbError),
}

impl Explain for NoConnection {
    fn kind(&self) -> ProblemKind {
        match self {
            Self::Unknown(_) => ProblemKind::NotFound,
            Self::Db(source) => source.kind(),
        }
    }

    fn advice(&self) -> Option<String> {
        match self {
            Self::Unknown(_) => Some("'headwater connection list' shows all connections".to_owned()),
            Self::Db(source) => source.advice(),
        }
    }

    fn retry_after_s(&self) -> Option<u32> {
        match self {
            Self::Db(source) => source.retry_after_s(),
            Self::Unknown(_) => None,
        }
    }
}

impl Service {
    /// The connection of that name, with its secret.
    pub(crate) async fn connection(&self, name: &str) -> Result<ConnectionRecord, NoConnection> {
        let found = self.db().read().await?.clouds().by_name(name).await?;
        found.ok_or_else(|| NoConnection::Unknown(name.to_owned()))
    }

    /// The clouds.
    pub(crate) fn cloud(&self) -> Result<Arc<dyn Cloud>, Problem> {
        let missing = || Problem::new(ProblemKind::Unavailable, "this daemon cannot use clouds");
        self.clouds().cloned().ok_or_else(missing)
    }
}
