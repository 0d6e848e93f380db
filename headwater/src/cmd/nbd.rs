//! The NBD server of `headwater export`: its exports, and its TLS with certificates and rights of clients.

use std::sync::Arc;

use anyhow::Context;
use headwater_block::Device;
use headwater_nbd::{
    Export, Exports, Limits, NamedExports, Options, Right, Server, ServerTls, ServerTlsOptions, SingleExport,
};

use crate::cli::{Demand, NbdArgs, NbdTlsArgs};
use crate::failure::invalid;

/// A running server, and what it offers.
pub struct Running {
    server: Server,
    exports: Vec<String>,
}

impl Running {
    /// The URIs of the disks.
    pub fn uris(&self) -> Vec<String> {
        match self.exports.as_slice() {
            [] => vec![self.server.uri()],
            exports => exports.iter().map(|export| self.server.uri_of(export)).collect(),
        }
    }
}

impl NbdArgs {
    /// Serves `devices`, one for each export, if that was requested.
    pub fn serve(&self, source: &str, devices: &[Arc<dyn Device>]) -> anyhow::Result<Option<Running>> {
        let Some(address) = &self.nbd else { return Ok(None) };
        let devices = devices.to_vec();
        let exports: Arc<dyn Exports> = if self.nbd_export.is_empty() {
            let device = devices.into_iter().next().context("nothing to serve")?;
            match self.tls.tls_allow.as_slice() {
                [] => SingleExport::new(device, source),
                names if names.iter().any(|name| name.contains('=')) => {
                    return Err(invalid(
                        "--tls-allow NAME=EXPORT needs --nbd-export EXPORT: with a single disk write --tls-allow NAME",
                    ));
                }
                names => SingleExport::for_clients(device, source, names.to_vec()),
            }
        } else {
            let export = |device| Export { device, description: source.to_owned() };
            let exports = self.nbd_export.iter().cloned().zip(devices.into_iter().map(export));
            NamedExports::new(exports, self.rights()?)
        };
        let options = Options { limits: Limits::default(), tls: self.tls.load()? };
        let server = Server::bind(address.clone(), exports, options)
            .with_context(|| format!("cannot serve '{source}'"))?;
        Ok(Some(Running { server, exports: self.nbd_export.clone() }))
    }

    /// The rights of clients: which certificate may open which exports.
    fn rights(&self) -> anyhow::Result<Vec<Right>> {
        let is_served = |name: &str| {
            if self.nbd_export.iter().any(|export| export == name) {
                Ok(())
            } else {
                Err(format!("there is no --nbd-export {name}"))
            }
        };
        let read = |text: &String| {
            Right::parse(text, is_served).map_err(|why| invalid(format!("--tls-allow {text}: {why}")))
        };
        self.tls.tls_allow.iter().map(read).collect()
    }
}

impl NbdTlsArgs {
    /// Loads the certificates, if TLS was requested.
    pub fn load(&self) -> anyhow::Result<Option<ServerTls>> {
        let Some(directory) = &self.tls_certificates else { return Ok(None) };
        let options = ServerTlsOptions {
            is_required: self.tls == Demand::Required,
            // Names count only in certificates that an authority has signed.
            verifies_clients: self.tls_verify_peer || !self.tls_allow.is_empty(),
        };
        ServerTls::load(directory, options).map(Some).context("cannot serve NBD with TLS")
    }
}
