//! A client of machine consoles: reads the log, or attaches to the console.

use anyhow::Context;
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::upgrade::Upgraded;
use hyper::{Method, StatusCode, header};
use hyper_util::rt::TokioIo;

use crate::client::{Client, escape};

/// The protocol of an attached console.
const PROTOCOL: &str = "headwater-console";

/// A connection with the console's bytes in both directions.
pub type Console = TokioIo<Upgraded>;

impl Client {
    /// Calls `each` with the console's log; with `follow` until the machine is off.
    pub async fn console_log(
        &self,
        name: &str,
        follow: bool,
        mut each: impl FnMut(&[u8]) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let path = format!("/api/v1/machines/{}/console?follow={follow}", escape(name));
        let mut answer = self.send(Method::GET, &path, None).await?.into_body();
        while let Some(frame) = answer.frame().await {
            let frame =
                frame.context("the connection to the daemon broke while it sent the console's log")?;
            each(frame.data_ref().map(|data| &data[..]).unwrap_or_default())?;
        }
        Ok(())
    }

    /// Attaches to the console.
    pub async fn attach_console(&self, name: &str) -> anyhow::Result<Console> {
        let path = format!("/api/v1/machines/{}/console/attach", escape(name));
        let request = self
            .request(Method::GET, &path)
            .header(header::CONNECTION, "upgrade")
            .header(header::UPGRADE, PROTOCOL)
            .body(Full::new(Bytes::new()))?;
        let response = self.exchange(request).await?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(super::refused(response).await);
        }
        Ok(TokioIo::new(
            hyper::upgrade::on(response)
                .await
                .context("the daemon did not switch the connection to the console")?,
        ))
    }
}
