//! Splits the path of a request into the kind and the names of a resource.

/// What a path names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Address {
    /// A resource of this kind, such as `Microsoft.Compute/galleries/images`.
    Resource { kind: String },
    /// The list of this kind, in a group or a subscription, or the action of a resource.
    ListOrAction { kind: String, parent: String, last: String },
    /// A resource group.
    Group,
    /// A subscription.
    Subscription,
    /// Anything else.
    Other,
}

impl Address {
    pub(super) fn of(path: &str) -> Self {
        let Some((before, rest)) = path.split_once("/providers/") else {
            let parts: Vec<&str> = path.split('/').skip(1).collect();
            return match parts.as_slice() {
                ["subscriptions", _] => Self::Subscription,
                ["subscriptions", _, groups, _] if groups.eq_ignore_ascii_case("resourceGroups") => {
                    Self::Group
                }
                _ => Self::Other,
            };
        };
        let parts: Vec<&str> = rest.split('/').collect();
        let Some((namespace, pairs)) = parts.split_first() else { return Self::Other };
        let kinds: Vec<&str> = pairs.iter().step_by(2).copied().collect();
        let kind = format!("{namespace}/{}", kinds.join("/"));
        match pairs {
            [] => Self::Other,
            _ if pairs.len().is_multiple_of(2) => Self::Resource { kind },
            [.., last] => {
                let parent = path.strip_suffix(*last).unwrap_or(path).trim_end_matches('/');
                let parent = if pairs.len() == 1 { before } else { parent };
                Self::ListOrAction { kind, parent: parent.to_owned(), last: (*last).to_owned() }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Address;

    #[test]
    fn paths_name_resources_lists_and_actions() {
        let kind = |path: &str| match Address::of(path) {
            Address::Resource { kind } => format!("resource {kind}"),
            Address::ListOrAction { kind, last, .. } => format!("{last} in {kind}"),
            other => format!("{other:?}"),
        };
        let group = "/subscriptions/s/resourceGroups/g";
        assert_eq!(kind(group), "Group");
        assert_eq!(kind("/subscriptions/s"), "Subscription");
        let compute = format!("{group}/providers/Microsoft.Compute");
        assert_eq!(
            kind(&format!("{compute}/galleries/g/images/i/versions/1.0.0")),
            "resource Microsoft.Compute/galleries/images/versions"
        );
        assert_eq!(kind(&format!("{compute}/disks")), "disks in Microsoft.Compute/disks");
        assert_eq!(
            kind(&format!("{compute}/virtualMachines/a/reimage")),
            "reimage in Microsoft.Compute/virtualMachines/reimage"
        );
    }
}
