//! The statements that read and change connections to clouds, and what is there.

use async_trait::async_trait;
use headwater_api::name::natural;
use headwater_api::{Connection, ConnectionAuth, PublishState, PublishedImage};

use crate::error::DbError;
use crate::record::{CloudOperation, ConnectionRecord, Secret};
use crate::repository::CloudRepository;
use crate::sql::Unit;
use crate::sql::statement::{Insert, Row, Statement};

/// The column of the client secret.
const SECRET: &str = "connections.secret";

pub(super) struct Clouds<'a>(pub(super) &'a mut Unit);

fn connection(row: &Row) -> Result<Connection, DbError> {
    Ok(Connection {
        name: row.get("name")?,
        subscription: row.get("subscription")?,
        tenant: row.get("tenant")?,
        group: row.get("resource_group")?,
        region: row.get("region")?,
        auth: row.read("auth", |text| ConnectionAuth::parse(text).ok())?,
        client_id: row.get("client_id")?,
        authority: row.get("authority")?,
        management: row.get("management")?,
        created_by: row.get("created_by")?,
        created_at_ms: row.number("created_at_ms")?,
    })
}

fn unread(row: &Row) -> Result<ConnectionRecord, DbError> {
    let stored: Option<Vec<u8>> = row.get("secret")?;
    let (connection, owner) = (connection(row)?, row.get("owner")?);
    Ok(ConnectionRecord { connection, owner, secret: stored.map(|_| Secret::unread()) })
}

fn published(row: &Row) -> Result<PublishedImage, DbError> {
    Ok(PublishedImage {
        image: row.get("image")?,
        version: row.number("version")?,
        hash: row.get("hash")?,
        connection: row.get("connection")?,
        state: row.read("state", PublishState::parse)?,
        generation: row.count("generation")?,
        replicas: row.count("replicas")?,
        resource: row.get("resource")?,
        created_by: row.get("created_by")?,
        created_at_ms: row.number("created_at_ms")?,
    })
}

fn operation(row: &Row) -> Result<CloudOperation, DbError> {
    Ok(CloudOperation {
        connection: row.get("connection")?,
        scope: row.get("scope")?,
        path: row.get("path")?,
        verb: row.get("verb")?,
        api_version: row.get("api_version")?,
        body_hash: row.get("body_hash")?,
        operation: row.get("operation")?,
    })
}

#[async_trait]
impl CloudRepository for Clouds<'_> {
    async fn add(&mut self, record: &ConnectionRecord) -> Result<(), DbError> {
        let ConnectionRecord { connection, owner, secret } = record;
        let secret = secret.as_ref().map(|secret| {
            let text = secret.reveal();
            self.0.key.encrypt(SECRET, &connection.name, text)
        });
        let insert = Insert::into("connections")
            .set("name", &connection.name)
            .set("subscription", &connection.subscription)
            .set("tenant", &connection.tenant)
            .set("resource_group", &connection.group)
            .set("region", &connection.region)
            .set("owner", owner)
            .set("auth", connection.auth.name())
            .set("client_id", &connection.client_id)
            .set("secret", secret.transpose()?)
            .set("authority", &connection.authority)
            .set("management", &connection.management)
            .set("created_by", &connection.created_by)
            .set("created_at_ms", connection.created_at_ms);
        self.0.add(insert, || format!("connection '{}'", connection.name)).await
    }

    async fn by_name(&mut self, name: &str) -> Result<Option<ConnectionRecord>, DbError> {
        let found =
            self.0.row(Statement::new("SELECT * FROM connections WHERE name = $1").bind(name)).await?;
        let Some(row) = found else { return Ok(None) };
        let stored: Option<Vec<u8>> = row.get("secret")?;
        let secret = stored.map(|stored| self.0.key.decrypt(SECRET, name, stored)).transpose()?;
        let (connection, owner) = (connection(&row)?, row.get("owner")?);
        Ok(Some(ConnectionRecord { connection, owner, secret: secret.map(Secret::new) }))
    }

    async fn list(&mut self) -> Result<Vec<ConnectionRecord>, DbError> {
        let mut records = self.0.all(Statement::new("SELECT * FROM connections"), unread).await?;
        records.sort_by(|a, b| natural(&a.connection.name, &b.connection.name));
        Ok(records)
    }

    async fn set_secret(&mut self, name: &str, secret: &Secret) -> Result<bool, DbError> {
        let secret = self.0.key.encrypt(SECRET, name, secret.reveal())?;
        // SQLite's WAL must not keep the old secret.
        self.0.has_removed = true;
        let update = Statement::new("UPDATE connections SET secret = $1 WHERE name = $2");
        self.0.changes_one(update.bind(secret).bind(name)).await
    }

    async fn remove(&mut self, name: &str) -> Result<bool, DbError> {
        // SQLite's WAL must not keep the secret.
        self.0.has_removed = true;
        self.0.changes_one(Statement::new("DELETE FROM connections WHERE name = $1").bind(name)).await
    }

    async fn published(&mut self) -> Result<Vec<PublishedImage>, DbError> {
        let mut all = self.0.all(Statement::new("SELECT * FROM published_images"), published).await?;
        all.sort_by(|a, b| {
            let by_image = natural(&a.image, &b.image).then(a.version.cmp(&b.version));
            by_image.then_with(|| natural(&a.connection, &b.connection))
        });
        Ok(all)
    }

    async fn set_published(&mut self, published: &PublishedImage) -> Result<(), DbError> {
        self.remove_published(published).await?;
        let insert = Insert::into("published_images")
            .set("connection", &published.connection)
            .set("image", &published.image)
            .set("version", published.version)
            .set("hash", &published.hash)
            .set("state", published.state.name())
            .set("generation", published.generation)
            .set("replicas", published.replicas)
            .set("resource", &published.resource)
            .set("created_by", &published.created_by)
            .set("created_at_ms", published.created_at_ms);
        self.0.add(insert, || format!("published {}@{}", published.image, published.version)).await
    }

    async fn remove_published(&mut self, published: &PublishedImage) -> Result<bool, DbError> {
        let delete = "DELETE FROM published_images WHERE connection = $1 AND image = $2 AND version = $3";
        let PublishedImage { connection, image, version, .. } = published;
        self.0.changes_one(Statement::new(delete).bind(connection).bind(image).bind(*version)).await
    }

    async fn begin_operation(&mut self, operation: &CloudOperation) -> Result<(), DbError> {
        let CloudOperation { connection, scope, path, .. } = operation;
        self.end_operation(connection, scope, path).await?;
        let insert = Insert::into("cloud_operations")
            .set("connection", connection)
            .set("scope", scope)
            .set("path", path)
            .set("verb", &operation.verb)
            .set("api_version", &operation.api_version)
            .set("body_hash", &operation.body_hash)
            .set("operation", &operation.operation);
        self.0.add(insert, || format!("operation on '{path}'")).await
    }

    async fn operation_accepted(&mut self, operation: &CloudOperation) -> Result<bool, DbError> {
        let update =
            "UPDATE cloud_operations SET operation = $1 WHERE connection = $2 AND scope = $3 AND path = $4";
        let CloudOperation { connection, scope, path, operation, .. } = operation;
        let update = Statement::new(update).bind(operation).bind(connection).bind(scope).bind(path);
        self.0.changes_one(update).await
    }

    async fn end_operation(&mut self, connection: &str, scope: &str, path: &str) -> Result<(), DbError> {
        let delete = "DELETE FROM cloud_operations WHERE connection = $1 AND scope = $2 AND path = $3";
        self.0.run(Statement::new(delete).bind(connection).bind(scope).bind(path)).await.map(drop)
    }

    async fn operations(&mut self, connection: &str) -> Result<Vec<CloudOperation>, DbError> {
        let find = "SELECT * FROM cloud_operations WHERE connection = $1 ORDER BY id";
        self.0.all(Statement::new(find).bind(connection), operation).await
    }

    async fn orphans(&mut self, connection: &str) -> Result<Vec<(String, u64)>, DbError> {
        let find = "SELECT * FROM cloud_orphans WHERE connection = $1 ORDER BY resource";
        let orphan = |row: &Row| Ok((row.get("resource")?, row.number("seen_at_ms")?));
        self.0.all(Statement::new(find).bind(connection), orphan).await
    }

    async fn set_orphans(&mut self, connection: &str, orphans: &[(String, u64)]) -> Result<(), DbError> {
        let delete = Statement::new("DELETE FROM cloud_orphans WHERE connection = $1").bind(connection);
        self.0.run(delete).await?;
        for (resource, seen_at_ms) in orphans {
            let insert = Insert::into("cloud_orphans")
                .set("connection", connection)
                .set("resource", resource)
                .set("seen_at_ms", *seen_at_ms);
            self.0.add(insert, || format!("orphan '{resource}'")).await?;
        }
        Ok(())
    }
}
