//! `GET /api/v1/tokens`: all named tokens.

use axum::Json;
use axum::extract::State;
use headwater_api::TokenList;
use headwater_db::{DbError, TokenRecord};

use super::create_token::info;
use crate::Service;
use crate::answer::Failure;
use crate::token::hash_of;

/// All named tokens with their roles, without their secrets. Expired tokens are listed until they are revoked.
#[utoipa::path(
    get,
    path = "/api/v1/tokens",
    security(("token" = ["admin", "everything"])),
    tag = "access",
    responses((status = 200, body = TokenList)),
)]
pub(super) async fn list_tokens(State(service): State<Service>) -> Result<Json<TokenList>, Failure> {
    let records = service.db().read().await?.tokens().list().await?;
    Ok(Json(TokenList { tokens: records.into_iter().map(info).collect() }))
}

impl Service {
    /// The token with this secret, if there is one.
    pub(crate) async fn token_of(&self, secret: &str) -> Result<Option<TokenRecord>, DbError> {
        self.db().read().await?.tokens().by_hash(&hash_of(secret)).await
    }

    /// The token of the client certificate with this fingerprint, if there is one.
    pub(crate) async fn token_of_certificate(
        &self,
        fingerprint: &str,
    ) -> Result<Option<TokenRecord>, DbError> {
        self.db().read().await?.tokens().by_hash(fingerprint).await
    }
}
