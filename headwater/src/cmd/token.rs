//! `headwater token`: creates, lists and revokes tokens for the API over TCP.

use std::path::Path;

use anyhow::Context;
use headwater_api::{CreateToken, Role, Scopes, TokenInfo};
use headwater_block::small_file;

use crate::cli::TokenCommand;
use crate::client::Client;
use crate::failure::invalid;
use crate::show;

/// Runs a command.
pub async fn run(client: Client, command: TokenCommand, json: bool) -> anyhow::Result<u8> {
    match command {
        TokenCommand::Create { name, role, catalog, image, expires, certificate } => {
            let scopes = Scopes { catalogs: catalog, images: image };
            let scopes = Some(scopes).filter(|scopes| *scopes != Scopes::default());
            let certificate = certificate.as_deref().map(read_certificate).transpose()?;
            let request = CreateToken { name, role, scopes, valid_s: expires, certificate };
            let token = client.create_token(&request).await?;
            if json {
                show::json(&token)?;
            } else {
                // Only the secret goes to standard output, for scripts.
                let until = token.info.expires_at_ms.map_or_else(
                    || "until it is revoked".to_owned(),
                    |end| format!("until {}", show::time(end)),
                );
                let (name, role) = (&token.info.name, role_of(token.info.role, token.info.scopes.as_ref()));
                match &token.info.certificate {
                    Some(fingerprint) => show::line(&format!(
                        "token {name} has the role {role} {until}, for the certificate {fingerprint}"
                    ))?,
                    None => {
                        show::aside(&format!(
                            "token {name} has the role {role} {until}; its secret is shown only now:\n"
                        ));
                        show::line(&token.secret)?;
                    }
                }
            }
        }
        TokenCommand::List => {
            let list = client.tokens().await?;
            if json { show::json(&list)? } else { show_list(&list.tokens)? }
        }
        TokenCommand::Revoke { name } => {
            client.revoke_token(&name).await?;
            let text = format!("revoked token {name}");
            if json { show::removed(&[name])? } else { show::line(&text)? }
        }
    }
    Ok(0)
}

fn read_certificate(path: &Path) -> anyhow::Result<String> {
    let read = small_file::read(path, small_file::PEM_MAX_BYTES);
    let bytes = read.with_context(|| format!("cannot read the certificate {}", path.display()))?;
    let text = String::from_utf8(bytes)
        .map_err(|_| invalid(format!("{} is not a certificate in PEM", path.display())))?;
    if text.contains("PRIVATE KEY-----") {
        let shown = path.display();
        return Err(invalid(format!(
            "{shown} has a private key, which must not leave this host: give a file with the certificate alone"
        )));
    }
    Ok(text)
}

/// A role and its scopes, in words.
pub fn role_of(role: Role, scopes: Option<&Scopes>) -> String {
    scopes.map_or_else(|| role.to_string(), |scopes| format!("{role} for {scopes}"))
}

fn show_list(tokens: &[TokenInfo]) -> anyhow::Result<()> {
    let row = |token: &TokenInfo| {
        vec![
            token.name.clone(),
            token.role.to_string(),
            token.scopes.as_ref().map_or_else(|| "everything".to_owned(), ToString::to_string),
            token.certificate.as_ref().map_or("secret", |_| "certificate").to_owned(),
            token.expires_at_ms.map_or_else(|| "-".to_owned(), show::time),
            show::time(token.created_at_ms),
            token.created_by.clone(),
        ]
    };
    show::table(&["TOKEN", "ROLE", "FOR", "KNOWN BY", "ENDS", "CREATED", "BY"], tokens.iter().map(row))
}
