//! Requests for personality strings, which guests read.

use headwater_api::{Personality, SetPersonality};
use hyper::Method;

use crate::client::{Client, escape, json};

/// Who has personality strings.
#[derive(Clone, Copy, Debug)]
pub enum Owner<'a> {
    /// The machine of this name.
    Machine(&'a str),
    /// The catalog of this name.
    Catalog(&'a str),
}

impl<'a> Owner<'a> {
    /// Its name.
    pub const fn name(self) -> &'a str {
        match self {
            Self::Machine(name) | Self::Catalog(name) => name,
        }
    }

    fn path(self) -> String {
        let kind = match self {
            Self::Machine(_) => "machines",
            Self::Catalog(_) => "catalogs",
        };
        format!("/api/v1/{kind}/{}/personality", escape(self.name()))
    }
}

impl Client {
    /// The personality strings of a machine or a catalog.
    pub async fn personality(&self, owner: Owner<'_>) -> anyhow::Result<Personality> {
        self.get(&owner.path()).await
    }

    /// Changes them.
    pub async fn set_personality(
        &self,
        owner: Owner<'_>,
        request: &SetPersonality,
    ) -> anyhow::Result<Personality> {
        let body = serde_json::to_vec(request)?;
        json(self.send(Method::PATCH, &owner.path(), Some(body)).await?).await
    }
}
