//! A client of connections to clouds, and of the versions that are published there.

use headwater_api::{
    Connection, ConnectionCheck, ConnectionList, CreateConnection, PublishRequest, PublishedList,
    SetConnection, SweepRequest, TaskResult, UnpublishRequest,
};
use hyper::Method;

use crate::client::tasks::Step;
use crate::client::{Client, escape, json};

impl Client {
    /// All connections.
    pub async fn connections(&self) -> anyhow::Result<ConnectionList> {
        self.get("/api/v1/connections").await
    }

    /// One connection.
    pub async fn connection(&self, name: &str) -> anyhow::Result<Connection> {
        self.get(&format!("/api/v1/connections/{}", escape(name))).await
    }

    /// Adds a connection.
    pub async fn create_connection(&self, request: &CreateConnection) -> anyhow::Result<Connection> {
        self.post("/api/v1/connections", request).await
    }

    /// Changes a connection.
    pub async fn set_connection(&self, name: &str, request: &SetConnection) -> anyhow::Result<Connection> {
        let path = format!("/api/v1/connections/{}", escape(name));
        json(self.send(Method::PATCH, &path, Some(serde_json::to_vec(request)?)).await?).await
    }

    /// Removes a connection; with `forget` also all that the database has of it.
    pub async fn remove_connection(&self, name: &str, forget: bool) -> anyhow::Result<()> {
        let path = format!("/api/v1/connections/{}?forget={forget}", escape(name));
        self.send(Method::DELETE, &path, None).await.map(drop)
    }

    /// Tries a connection.
    pub async fn check_connection(&self, name: &str) -> anyhow::Result<ConnectionCheck> {
        let path = format!("/api/v1/connections/{}/check", escape(name));
        json(self.send(Method::POST, &path, None).await?).await
    }

    /// Finds resources that nothing needs, and removes them if the request says so.
    pub async fn sweep_connection(
        &self,
        name: &str,
        request: SweepRequest,
        progress: impl FnMut(Step),
    ) -> anyhow::Result<TaskResult> {
        let path = format!("/api/v1/connections/{}/sweep", escape(name));
        self.run_task(&path, Some(serde_json::to_vec(&request)?), progress).await
    }

    /// Publishes a version.
    pub async fn publish(
        &self,
        reference: &str,
        request: &PublishRequest,
        progress: impl FnMut(Step),
    ) -> anyhow::Result<TaskResult> {
        let path = format!("/api/v1/images/{}/publish", escape(reference));
        self.run_task(&path, Some(serde_json::to_vec(request)?), progress).await
    }

    /// Removes a published version.
    pub async fn unpublish(
        &self,
        reference: &str,
        request: &UnpublishRequest,
        progress: impl FnMut(Step),
    ) -> anyhow::Result<TaskResult> {
        let path = format!("/api/v1/images/{}/unpublish", escape(reference));
        self.run_task(&path, Some(serde_json::to_vec(request)?), progress).await
    }

    /// The published versions, of one image or of all.
    pub async fn published(&self, image: Option<&str>) -> anyhow::Result<PublishedList> {
        let image = image.map(|image| format!("?image={}", escape(image))).unwrap_or_default();
        self.get(&format!("/api/v1/published{image}")).await
    }
}
