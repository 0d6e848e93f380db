//! The statements that read and change named tokens.

use async_trait::async_trait;
use headwater_api::name::natural;
use headwater_api::{Role, Scopes};

use crate::error::DbError;
use crate::record::TokenRecord;
use crate::repository::TokenRepository;
use crate::sql::Unit;
use crate::sql::statement::{Insert, Row, Statement, unreadable};

pub(super) struct Tokens<'a>(pub(super) &'a mut Unit);

fn record(row: &Row) -> Result<TokenRecord, DbError> {
    Ok(TokenRecord {
        name: row.get("name")?,
        hash: row.get("hash")?,
        role: row.read("role", |text| Role::parse(text).ok())?,
        scopes: scopes(row)?,
        created_by: row.get("created_by")?,
        created_at_ms: row.number("created_at_ms")?,
        expires_at_ms: row.maybe_number("expires_at_ms")?,
    })
}

/// Scopes that cannot be read are an error: without scopes, the role would be for everything.
fn scopes(row: &Row) -> Result<Option<Scopes>, DbError> {
    let text: Option<String> = row.get("scopes")?;
    text.map(|text| Scopes::parse(&text).map_err(|_| unreadable("scopes", &text))).transpose()
}

#[async_trait]
impl TokenRepository for Tokens<'_> {
    async fn add(&mut self, token: &TokenRecord) -> Result<(), DbError> {
        let insert = Insert::into("tokens")
            .set("name", &token.name)
            .set("hash", &token.hash)
            .set("role", token.role.name())
            .set("scopes", &token.scopes.as_ref().map(ToString::to_string))
            .set("created_by", &token.created_by)
            .set("created_at_ms", token.created_at_ms)
            .set("expires_at_ms", token.expires_at_ms);
        self.0.add(insert, || format!("token '{}'", token.name)).await
    }

    async fn by_hash(&mut self, hash: &str) -> Result<Option<TokenRecord>, DbError> {
        let found = self.0.row(Statement::new("SELECT * FROM tokens WHERE hash = $1").bind(hash)).await?;
        found.as_ref().map(record).transpose()
    }

    async fn list(&mut self) -> Result<Vec<TokenRecord>, DbError> {
        let mut records = self.0.all(Statement::new("SELECT * FROM tokens"), record).await?;
        records.sort_by(|a, b| natural(&a.name, &b.name));
        Ok(records)
    }

    async fn remove(&mut self, name: &str) -> Result<bool, DbError> {
        self.0.changes_one(Statement::new("DELETE FROM tokens WHERE name = $1").bind(name)).await
    }
}
