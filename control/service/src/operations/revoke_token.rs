//! `DELETE /api/v1/tokens/{token}`: revoke a named token.

use axum::extract::State;
use axum::http::StatusCode;
use headwater_api::{Change, Problem, ProblemKind};
use serde_json::json;

use crate::Service;
use crate::answer::{Explain, Failure};
use crate::caller::Caller;
use crate::extract::Name;
use crate::operations::create_token::info;

#[derive(Debug, thiserror::Error)]
#[error("there is no token '{0}'")]
struct Unknown(String);

impl Explain for Unknown {
    fn kind(&self) -> ProblemKind {
        ProblemKind::NotFound
    }

    fn advice(&self) -> Option<String> {
        Some("'headwater token list' shows all tokens".to_owned())
    }
}

/// Revokes a token: later requests with it are refused. Requests that were accepted before continue.
#[utoipa::path(
    delete,
    path = "/api/v1/tokens/{token}",
    security(("token" = ["admin", "everything"])),
    tag = "access",
    params(("token" = String, Path, description = "Its name")),
    responses((status = 204), (status = 404, description = "No such token", body = Problem)),
)]
pub(super) async fn revoke_token(
    State(service): State<Service>,
    caller: Caller,
    Name(name): Name,
) -> Result<StatusCode, Failure> {
    let handle = service.clone();
    let work = async move {
        let mut repo = handle.db().write().await?;
        let found = repo.tokens().list().await?.into_iter().find(|token| token.name == name);
        let Some(before) = found else { return Err(Unknown(name).into()) };
        repo.tokens().remove(&name).await?;
        let event = handle.event(&caller, format!("token {name}"), "revoked", "");
        repo.events().append(event.changing(Change::between(&info(before), &json!({})))).await?;
        repo.save().await?;
        Ok::<_, Failure>(StatusCode::NO_CONTENT)
    };
    service.to_the_end(work).await
}
