//! The journal of requests to a cloud, in the database. Each work has its own entries, so that the recovery of one work
//! does not touch requests of another one that is under way.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use headwater_azure::{AzureError, AzureErrorKind, Entry, Journal, Verb};
use headwater_db::{CloudOperation, Database, DbError};

/// The journal of one work on a connection.
pub struct DbJournal {
    db: Arc<dyn Database>,
    connection: String,
    scope: String,
    /// The part of a path without which an entry is not listed.
    only: Option<String>,
}

impl fmt::Debug for DbJournal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DbJournal").field("connection", &self.connection).field("scope", &self.scope).finish()
    }
}

impl DbJournal {
    /// The journal of the work with this name.
    pub fn new(db: Arc<dyn Database>, connection: String, scope: String) -> Self {
        Self { db, connection, scope, only: None }
    }

    /// The same journal, which lists only entries whose paths contain this text.
    pub fn only(self, part: String) -> Self {
        Self { only: Some(part), ..self }
    }

    fn row(&self, entry: &Entry) -> CloudOperation {
        CloudOperation {
            connection: self.connection.clone(),
            scope: self.scope.clone(),
            path: entry.path.clone(),
            verb: entry.verb.word().to_owned(),
            api_version: entry.api_version.clone(),
            body_hash: entry.body_hash.clone(),
            operation: entry.operation.clone(),
        }
    }
}

fn verb_of(word: &str) -> Result<Verb, AzureError> {
    Verb::parse(word).ok_or_else(|| {
        let what = format!("the journal of requests has the unknown word '{word}'");
        AzureError::new(AzureErrorKind::Invalid, what)
    })
}

/// The error of a journal that cannot be used. The request is not sent then.
fn unusable(error: DbError) -> AzureError {
    let what = format!("the journal of requests in the database cannot be used: {error}");
    AzureError::new(AzureErrorKind::Unavailable, what).advise("repeat the command")
}

#[async_trait]
impl Journal for DbJournal {
    async fn begin(&self, entry: &Entry) -> Result<(), AzureError> {
        let mut repo = self.db.write().await.map_err(unusable)?;
        repo.clouds().begin_operation(&self.row(entry)).await.map_err(unusable)?;
        repo.save().await.map_err(unusable)
    }

    async fn accepted(&self, path: &str, operation: &str) -> Result<(), AzureError> {
        let row = CloudOperation {
            connection: self.connection.clone(),
            scope: self.scope.clone(),
            path: path.to_owned(),
            verb: String::new(),
            api_version: String::new(),
            body_hash: String::new(),
            operation: Some(operation.to_owned()),
        };
        let mut repo = self.db.write().await.map_err(unusable)?;
        // A missing row means that the entry has ended meanwhile.
        repo.clouds().operation_accepted(&row).await.map_err(unusable)?;
        repo.save().await.map_err(unusable)
    }

    async fn end(&self, path: &str) -> Result<(), AzureError> {
        let mut repo = self.db.write().await.map_err(unusable)?;
        repo.clouds().end_operation(&self.connection, &self.scope, path).await.map_err(unusable)?;
        repo.save().await.map_err(unusable)
    }

    async fn open(&self) -> Result<Vec<Entry>, AzureError> {
        let mut repo = self.db.read().await.map_err(unusable)?;
        let all = repo.clouds().operations(&self.connection).await.map_err(unusable)?;
        let is_listed = |row: &CloudOperation| self.only.as_ref().is_none_or(|part| row.path.contains(part));
        let own = all.into_iter().filter(|row| row.scope == self.scope && is_listed(row));
        own.map(|row| {
            let CloudOperation { path, verb, api_version, body_hash, operation, .. } = row;
            Ok(Entry { verb: verb_of(&verb)?, path, api_version, body_hash, operation })
        })
        .collect()
    }
}
