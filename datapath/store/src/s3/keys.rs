//! Names the service from which `object_store` gets S3 credentials if the environment has none, for error messages: the
//! metadata service of the instance, of its container or of its pod, or a web identity. `object_store` fetches and caches
//! them.

use std::sync::Arc;

use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey};

use crate::s3::failure::Failure;

/// The address that `object_store` asks, unless `AWS_METADATA_ENDPOINT` gives another one.
const INSTANCE_METADATA: &str = "http://169.254.169.254";

/// A service that `object_store` asks for credentials before a request is sent.
#[derive(Clone, Debug)]
pub(super) struct KeySource {
    /// The beginning of the error message if it gives none.
    failure_text: Arc<str>,
}

impl KeySource {
    /// The source of credentials for a client of this builder. `None`: the client has credentials or signs
    /// nothing. Checks the sources in the same order as `object_store`.
    pub(super) fn of(builder: &AmazonS3Builder) -> Option<Self> {
        use AmazonS3ConfigKey as Key;
        let set = |key: Key| builder.get_config_value(&key);
        let is_no = |text: String| matches!(&*text.to_ascii_lowercase(), "0" | "false" | "off" | "no" | "n");
        let signs = set(Key::SkipSignature).is_none_or(is_no);
        if !signs || set(Key::AccessKeyId).is_some() || set(Key::SecretAccessKey).is_some() {
            return None;
        }
        let failure_text = if let (Some(file), Some(role)) =
            (set(Key::WebIdentityTokenFile), set(Key::RoleArn))
        {
            format!("the credentials of the role {role} could not be obtained for the token in {file}")
        } else if let Some(path) = set(Key::ContainerCredentialsRelativeUri) {
            format!(
                "the credentials of the container's role could not be obtained from http://169.254.170.2{path}"
            )
        } else if let (Some(url), Some(_)) =
            (set(Key::ContainerCredentialsFullUri), set(Key::ContainerAuthorizationTokenFile))
        {
            format!("the credentials of the pod's role could not be obtained from {url}")
        } else {
            let url = set(Key::MetadataEndpoint);
            format!(
                "the credentials of the machine's role could not be obtained from {}",
                url.as_deref().unwrap_or(INSTANCE_METADATA)
            )
        };
        Some(Self { failure_text: failure_text.into() })
    }

    /// Has the client fetch credentials, unless it has some that are valid for long enough. The client caches them.
    pub(super) async fn ask(&self, s3: &AmazonS3) -> Result<(), Failure> {
        match s3.credentials().get_credential().await {
            Ok(_) => Ok(()),
            Err(e) => Err(Failure::no_keys(&self.failure_text, &e)),
        }
    }

    /// The failure if the credentials did not arrive in time.
    pub(super) fn timed_out(&self) -> Failure {
        Failure::NoKeys(format!("{}: no answer arrived", self.failure_text))
    }
}

#[cfg(test)]
mod tests {
    use object_store::aws::AmazonS3ConfigKey as Key;

    use super::*;

    #[test]
    fn the_source_of_keys_is_named() {
        let asked = |set: &[(Key, &str)]| {
            let with =
                |builder: AmazonS3Builder, (key, value): &(Key, &str)| builder.with_config(*key, *value);
            let builder = set.iter().fold(AmazonS3Builder::new(), with);
            KeySource::of(&builder).map(|source| source.failure_text.to_string())
        };
        let machine =
            "the credentials of the machine's role could not be obtained from http://169.254.169.254";
        assert_eq!(asked(&[]).as_deref(), Some(machine));
        assert_eq!(asked(&[(Key::SkipSignature, "No")]).as_deref(), Some(machine));
        // A role without its token file is ignored.
        assert_eq!(asked(&[(Key::RoleArn, "arn:x")]).as_deref(), Some(machine));
        let named = |set: &[(Key, &str)], words: &str| {
            let told = asked(set).unwrap();
            assert!(told.contains(words), "{told}");
        };
        named(&[(Key::MetadataEndpoint, "http://127.0.0.1:9")], "from http://127.0.0.1:9");
        named(&[(Key::RoleArn, "arn:x"), (Key::WebIdentityTokenFile, "/t")], "arn:x could not be obtained");
        named(&[(Key::ContainerCredentialsRelativeUri, "/v2/x")], "from http://169.254.170.2/v2/x");
        let pod = [
            (Key::ContainerCredentialsFullUri, "http://169.254.170.23/v1"),
            (Key::ContainerAuthorizationTokenFile, "/t"),
        ];
        named(&pod, "the credentials of the pod's role could not be obtained from http://169.254.170.23/v1");
        for nobody in [
            &[(Key::AccessKeyId, "k"), (Key::SecretAccessKey, "s")][..],
            &[(Key::AccessKeyId, "k")],
            &[(Key::SkipSignature, "true")],
        ] {
            assert_eq!(asked(nobody), None, "{nobody:?}");
        }
    }
}
